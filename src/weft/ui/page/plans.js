/* The plan explorer: sliders on the left of a question, the planner's memory and time bars as its answer. */
"use strict";
(function () {
  const { plotly, ask, id, element, colour, bytes, seconds, short, percent, COLOURS } = weft;
  const POWERS = Array.from({ length: 11 }, (_, place) => 2 ** place);
  const SLIDERS = [ // key, words, values, first
    ["tp", "tensor", POWERS.slice(0, 7), 1], ["pp", "pipeline", POWERS.slice(0, 7), 1], ["cp", "context", POWERS.slice(0, 7), 1],
    ["ep", "experts", POWERS.slice(0, 9), 1], ["dp_replicate", "replicas", POWERS.slice(0, 9), 1], ["zero", "ZeRO", [0, 1, 2, 3], 3],
    ["microbatches", "micro-batches", POWERS, 1], ["virtual_stages", "virtual stages", [1, 2, 4, 8], 1],
  ];
  const LISTS = [
    ["schedule", "schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"]],
    ["recompute", "recompute", ["none", "selective", "full"]], ["precision", "precision", ["bf16", "fp32", "fp16"]],
    ["offload", "optimizer on", ["none", "cpu"]],
  ];
  let isOpen = false;
  let asked = 0;
  let base = ""; // the keys without a slider, of the best plan

  function field(key) { return id(`plan-${key}`); }
  function labelled(words, ...inside) {
    const label = element("label", `${words} `);
    label.append(...inside);
    id("sliders").append(label);
  }
  function list(key, words, values, chosen) {
    const box = element("select", undefined, { id: `plan-${key}` });
    for (const value of values) box.append(element("option", value, { value, selected: value === chosen }));
    labelled(words, box);
  }

  async function build() {
    const known = await ask("/api/choices");
    list("model", "model", known.models, known.models.includes("llama-3-8b") ? "llama-3-8b" : known.models[0]);
    labelled("devices", element("input", undefined, { id: "plan-count", type: "number", min: 1, max: 65536, value: 8 }));
    list("device", "×", known.devices, "H100-80GB");
    for (const [key, words, values, first] of SLIDERS) {
      const slider = element("input", undefined, { id: `plan-${key}`, type: "range", min: 0, max: values.length - 1, step: 1 });
      slider.value = String(values.indexOf(first));
      labelled(words, slider, element("output", String(first), { id: `plan-${key}-value` }));
    }
    for (const [key, words, values] of LISTS) list(key, words, values);
    labelled("batch", element("input", undefined, { id: "plan-global_batch", type: "number", min: 1, placeholder: "usual" }));
    labelled("sequence", element("input", undefined, { id: "plan-sequence_length", type: "number", min: 2, placeholder: "usual" }));
    const button = element("button", "best plan", { type: "button", id: "plan-best" });
    button.onclick = () => answer("/api/best");
    const reset = element("button", "defaults", { type: "button", title: "keys without a slider as in an empty plan.toml" });
    reset.onclick = () => { base = ""; answer("/api/plan"); };
    id("sliders").append(button, reset);
    id("sliders").oninput = () => answer("/api/plan");
    id("sliders").onsubmit = (event) => event.preventDefault();
    answer("/api/plan");
  }

  function query() {
    const found = new URLSearchParams({ model: field("model").value, devices: `${field("count").value || 1}x${field("device").value}` });
    for (const [key, , values] of SLIDERS) {
      const value = values[Number(field(key).value)];
      id(`plan-${key}-value`).textContent = String(value);
      found.set(key, String(value));
    }
    for (const [key] of LISTS) found.set(key, field(key).value);
    for (const key of ["global_batch", "sequence_length"]) if (field(key).value) found.set(key, field(key).value);
    if (base) found.set("base", base);
    return found;
  }

  async function answer(path) {
    const number = ++asked;
    let found;
    try { found = await ask(path, query()); } catch (error) { found = { message: error.message }; }
    if (number !== asked) return; // a slider was moved since
    id("words").classList.toggle("refused", "message" in found || found.fits === false);
    if ("message" in found) {
      id("words").textContent = `${found.message}${found.hint ? ` (${found.hint})` : ""}`;
      return;
    }
    if (found.sliders) { place(found.sliders); base = JSON.stringify(found.base); }
    const fits = found.fits ? "fits" : "does not fit";
    id("words").textContent = `${found.words}: ${fits}, ${bytes(found.memory_bytes)} per device, ${seconds(found.step_s)} per step, ${short(found.tokens_per_s)} tokens/s, MFU ${percent(found.mfu)}`;
    id("memory-words").textContent = `${bytes(found.memory_bytes)} at the peak: ${found.peak_at}.`;
    id("time-words").textContent = `${seconds(found.step_s)}.`;
    id("plan-toml").textContent = found.plan_toml;
    bars("plan-memory", found.memory_terms, 2 ** 30, "GiB", bytes);
    bars("plan-time", found.time_terms, 1, "seconds", seconds);
  }

  function place(sliders) {
    for (const [key, , values] of SLIDERS) {
      const at = values.indexOf(sliders[key]);
      if (at >= 0) { field(key).value = String(at); id(`plan-${key}-value`).textContent = String(sliders[key]); }
    }
    for (const [key, , values] of LISTS) if (values.includes(sliders[key])) field(key).value = sliders[key];
  }

  function bars(box, terms, scale, unit, show) {
    const names = Object.keys(terms).filter((name) => terms[name] > 0);
    const data = names.map((name, place) => ({
      type: "bar", orientation: "h", y: [""], x: [terms[name] / scale], name: name.replaceAll("_", " "),
      customdata: [show(terms[name])], hovertemplate: "%{fullData.name}: %{customdata}<extra></extra>",
      marker: { color: colour(COLOURS[place % COLOURS.length]) },
    }));
    const axis = { gridcolor: colour("line"), zeroline: false, automargin: true };
    const layout = {
      height: 230, barmode: "stack", margin: { l: 8, r: 14, t: 4, b: 8 }, font: { color: colour("muted"), size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", legend: { orientation: "h", traceorder: "normal", y: -0.45 },
      xaxis: { ...axis, title: { text: unit }, rangemode: "tozero" }, yaxis: { ...axis, showticklabels: false },
    };
    plotly().then(() => Plotly.react(box, data, layout, { responsive: true, displayModeBar: false })).then(() => { id(box).dataset.drawn = "1"; });
  }

  document.addEventListener("view", (event) => {
    if (event.detail === "plans" && !isOpen) { isOpen = true; build(); }
  });
})();
