/* The page of `weft ui`: the table of runs, and their curves. Text from runs is set as text, never as HTML. */
"use strict";
const weft = (function () {
  const REFRESH_MS = 3000;
  const MAX_SELECTED = 50; // drawn at first
  const QUANTITIES = [
    ["loss", "Loss"], ["eval_loss", "Held-out loss"], ["grad_norm", "Gradient norm"], ["learning_rate", "Learning rate"],
    ["tokens_per_s", "Tokens / s"], ["samples_per_s", "Samples / s"], ["step_s", "Step time, s"],
    ["peak_memory_bytes", "Peak memory, bytes"], ["loss_scale", "Loss scale"], ["expert_load", "Busiest expert"],
    ["dropped_share", "Dropped choices"], ["auc", "AUC"], ["staleness_mean", "Staleness"], ["wait_s", "Waiting, s"],
  ];
  const COLUMNS = [
    ["name", "run"], ["status", "status"], ["model", "model"], ["plan", "plan"], ["ranks", "ranks", count], ["step", "step", steps],
    ["loss", "loss", digits], ["eval_loss", "held-out", digits], ["perplexity", "perplexity", digits],
    ["speed", "tokens/s", short], ["step_s", "step time", seconds], ["mfu", "MFU", percent],
    ["peak_memory_bytes", "memory", bytes], ["updated", "updated", ago],
  ];
  const STATUS = { finished: "good", done: "good", running: "shard", stopped: "warn", failed: "bad" };
  const COLOURS = ["blue", "orange", "teal", "purple", "slate", "rose", "gold", "sky", "moss", "brick"];
  const OVER = { step: "step", tokens: "tokens", time: "seconds" };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const style = getComputedStyle(document.documentElement);
  const state = { runs: [], chosen: null, sort: "updated", down: true, charts: new Map(), drawn: false, ready: false, plotly: null };

  function id(name) { return document.getElementById(name); }
  function colour(name) { return style.getPropertyValue(`--${name}`).trim(); }
  function element(tag, words, properties) {
    const made = Object.assign(document.createElement(tag), properties || {});
    if (words !== undefined) made.textContent = words;
    return made;
  }
  function digits(value) { return value === 0 ? "0" : Number(value).toPrecision(4); }
  function count(value) { return value.toLocaleString("en"); }
  function short(value) { return Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value); }
  function seconds(value) { return value < 1 ? `${(value * 1e3).toPrecision(3)} ms` : `${value.toPrecision(3)} s`; }
  function percent(value) { return `${(100 * value).toFixed(1)}%`; }
  function bytes(value) {
    const unit = ["B", "KiB", "MiB", "GiB", "TiB"];
    let place = 0;
    while (value >= 1024 && place < 4) { value /= 1024; place += 1; }
    return `${value.toPrecision(value < 1000 ? 3 : 4)} ${unit[place]}`;
  }
  function steps(value, run) { return run.steps ? `${count(value)} / ${count(run.steps)}` : count(value); }
  function ago(value) {
    const past = Math.max(0, Date.now() / 1e3 - value);
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (past >= size) return `${Math.floor(past / size)} ${unit} ago`;
    return "now";
  }

  async function ask(path, query) {
    const address = query ? `${path}?${query}` : path;
    const reply = await fetch(address, { cache: "no-store" });
    const found = reply.headers.get("Content-Type").startsWith("application/json") ? await reply.json() : { message: await reply.text() };
    if (!reply.ok) throw new Error(found.message);
    return found;
  }

  /* Plotly, when it is loaded: after the first drawing, which does without. */
  function plotly() {
    state.plotly ??= new Promise((done, failed) => {
      document.head.append(element("script", undefined, { src: "/plotly.js", onload: done, onerror: failed }));
    });
    return state.plotly;
  }

  /* The table */
  function shown() {
    const words = id("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = state.runs.filter((run) => {
      const text = [run.name, run.model, run.plan, run.status].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const sign = state.down ? -1 : 1;
    return runs.sort((a, b) => {
      const [x, y] = [a[state.sort], b[state.sort]];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return sign * (x < y ? -1 : x > y ? 1 : 0) || (a.name < b.name ? -1 : 1);
    });
  }

  function drawTable() {
    const head = element("tr");
    head.append(element("th", ""));
    for (const [key, words] of COLUMNS) {
      const cell = element("th", words + (state.sort === key ? (state.down ? " ↓" : " ↑") : ""), { scope: "col" });
      cell.onclick = () => { state.down = state.sort === key ? !state.down : true; state.sort = key; drawTable(); };
      head.append(cell);
    }
    id("runs").tHead.replaceChildren(head);
    const runs = shown();
    id("runs").tBodies[0].replaceChildren(...runs.map(drawRow));
    id("none").hidden = runs.length > 0;
    id("none").textContent = state.runs.length ? "No run matches the filter." : "There is no run in this folder yet.";
  }

  function drawRow(run) {
    const row = element("tr");
    const box = element("input", undefined, { type: "checkbox", checked: state.chosen.has(run.name), title: "draw its curves" });
    box.style.accentColor = colourOf(run.name);
    box.onchange = () => { state.chosen[box.checked ? "add" : "delete"](run.name); drawCharts(); };
    const first = element("td");
    first.append(box);
    row.append(first);
    for (const [key, , show] of COLUMNS) {
      const value = run[key];
      const cell = element(key === "name" ? "th" : "td", undefined, { className: show ? "number" : "" });
      if (key === "name") {
        const button = element("button", value, { type: "button", title: "its report" });
        button.onclick = () => openReport(value);
        cell.append(button);
      } else if (key === "status") {
        cell.append(element("span", value, { className: `chip ${STATUS[value] || ""}` }));
      } else if (value !== undefined && value !== null) {
        cell.textContent = show ? show(value, run) : value;
      }
      row.append(cell);
    }
    return row;
  }

  function colourOf(name) {
    const place = state.runs.findIndex((run) => run.name === name);
    return colour(COLOURS[Math.max(0, place) % COLOURS.length]);
  }

  function openReport(name) {
    const address = `/report?run=${encodeURIComponent(name)}`;
    id("detail-name").textContent = name;
    id("detail-link").href = address;
    id("report").src = address;
    id("detail").showModal();
  }

  /* The charts */
  function smooth(x, y, weight) {
    // an exponential mean whose first values are not pulled to zero
    let mean = 0, total = 0;
    return y.map((value) => {
      mean = mean * weight + value * (1 - weight);
      total = total * weight + (1 - weight);
      return Number((mean / total).toPrecision(7)); // a constant stays one
    });
  }

  function traces(field, curves) {
    const weight = Number(id("smoothing").value);
    const isPerplexity = id("perplexity").checked && field.endsWith("loss");
    const value = isPerplexity ? Math.exp : (one) => one;
    const found = [];
    for (const curve of curves) {
      const mode = curve.mean_x.length > 1 ? "lines" : "markers";
      const base = { type: "scatter", mode, name: curve.run, marker: { color: colourOf(curve.run) } };
      const line = { color: colourOf(curve.run), width: weight ? 1 : 1.6, simplify: false };
      const isFaint = weight > 0 && curve.mean_y.length > 2 && field !== "eval_loss";
      if (curve.x.length) found.push({ ...base, x: curve.x, y: curve.y.map(value), line, opacity: isFaint ? 0.25 : 1, hoverinfo: isFaint ? "skip" : "all" });
      if (isFaint) {
        const y = smooth(curve.mean_x, curve.mean_y.map(value), weight);
        found.push({ ...base, x: curve.mean_x, y, line: { ...line, width: 2 } });
      }
    }
    return found;
  }

  function layout(field, title) {
    const font = { color: colour("muted"), size: 12, family: "system-ui, sans-serif" };
    const axis = { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true };
    const over = id("over").value;
    return {
      height: field === "loss" ? 380 : 270, margin: { l: 8, r: 14, t: 8, b: 8 }, font, showlegend: false, hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: `${over} ${id("log-x").checked}`,
      hoverlabel: { namelength: -1 },
      xaxis: { ...axis, showgrid: false, title: { text: OVER[over] }, type: id("log-x").checked ? "log" : "linear" },
      yaxis: { ...axis, title: { text: title }, type: id("log-y").checked ? "log" : "linear" },
    };
  }

  function chartOf(field, title) {
    if (state.charts.has(field)) return state.charts.get(field);
    const figure = element("figure", undefined, { className: field === "loss" ? "wide" : "half" });
    const words = element("figcaption");
    words.append(element("h3", title));
    const box = element("div", undefined, { className: "plot", id: `chart-${field}` });
    box.style.minHeight = `${field === "loss" ? 380 : 270}px`;
    figure.append(words, box);
    id("charts").append(figure);
    const chart = { field, title, figure, box, range: null, key: "", visible: false, curves: null };
    state.charts.set(field, chart);
    watcher.observe(figure);
    return chart;
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = [...state.charts.values()].find((one) => one.figure === entry.target);
      chart.visible = entry.isIntersecting;
      if (chart.visible) drawChart(chart);
    }
  }, { rootMargin: "200px" });

  function drawCharts() {
    for (const [field, title] of QUANTITIES) {
      if (!state.ready && field !== "loss") continue; // the first drawings have the machine to themselves
      const chart = chartOf(field, title);
      chart.figure.hidden = !state.runs.some((run) => state.chosen.has(run.name) && (run.fields || []).includes(field));
      if (!chart.figure.hidden) drawChart(chart);
    }
  }

  async function drawChart(chart) {
    if (!chart.visible && chart.field !== "loss") return;
    const runs = state.runs.filter((run) => state.chosen.has(run.name));
    const query = new URLSearchParams({ field: chart.field, x: id("over").value, log: id("log-x").checked ? "1" : "0" });
    if (Number(id("smoothing").value) > 0 && chart.field !== "eval_loss") query.set("smoothed", "1"); // of many runs, means are enough
    if (chart.range) { query.set("low", chart.range[0]); query.set("high", chart.range[1]); }
    for (const run of runs) query.append("run", run.name);
    const key = `${query} ${runs.map((run) => run.size)} ${state.read}`;
    if (key !== chart.key) {
      chart.key = key;
      try {
        const found = await ask("/api/curves", query);
        if (key !== chart.key) return; // a later request is under way
        chart.curves = found.curves;
      } catch (error) { say(error.message); return; }
    }
    if (chart.curves) redraw(chart);
  }

  async function redraw(chart) {
    const isPerplexity = id("perplexity").checked && chart.field.endsWith("loss");
    const title = isPerplexity ? chart.title.replace(/loss/i, "perplexity") : chart.title;
    chart.figure.querySelector("h3").textContent = title;
    if (!state.drawn && !id("log-x").checked && !id("log-y").checked) return drawFirst(chart, title);
    await plotly();
    if (chart.box.firstChild?.className === "quick") chart.box.replaceChildren();
    const config = { responsive: true, displayModeBar: false };
    Plotly.react(chart.box, traces(chart.field, chart.curves), layout(chart.field, title.toLowerCase()), config).then(() => {
      if (!chart.isTied) { chart.isTied = true; chart.box.on("plotly_relayout", (change) => zoom(chart, change)); }
      if (!state.ready) markReady();
    });
  }

  function drawFirst(chart, title) {
    const titles = [OVER[id("over").value], title.toLowerCase()];
    quick.draw(chart.box, traces(chart.field, chart.curves), titles, { text: colour("muted"), grid: colour("line") });
    requestAnimationFrame(() => setTimeout(markDrawn)); // when it is on the screen
  }

  function zoom(chart, change) {
    if ("xaxis.range[0]" in change) {
      const raise = (value) => (id("log-x").checked ? 10 ** value : value);
      chart.range = [raise(change["xaxis.range[0]"]), raise(change["xaxis.range[1]"])];
    } else if (change["xaxis.autorange"]) chart.range = null;
    else return;
    drawChart(chart);
  }

  function markDrawn() {
    if (state.drawn) return;
    state.drawn = true;
    performance.mark("drawn");
    document.body.dataset.drawn = "1";
    drawCharts();
  }

  function markReady() {
    state.ready = true;
    performance.mark("ready");
    document.body.dataset.ready = "1";
    markDrawn();
    drawCharts();
  }

  /* Refreshing */
  function say(words) { id("state").textContent = words; }

  async function refresh() {
    const found = await ask("/api/runs");
    for (const run of found.runs) {
      const loss = run.eval_loss ?? run.loss;
      if (loss !== undefined && loss < 50 && run.kind !== "server") run.perplexity = Math.exp(loss);
      run.speed = run.tokens_per_s ?? run.samples_per_s;
    }
    state.runs = found.runs;
    state.chosen ??= new Set([...found.runs].sort((a, b) => b.updated - a.updated).slice(0, MAX_SELECTED).map((run) => run.name));
    for (const run of found.runs) if (!(state.seen ??= new Set(found.runs.map((one) => one.name))).has(run.name)) { state.seen.add(run.name); state.chosen.add(run.name); }
    const share = found.size_bytes ? found.read_bytes / found.size_bytes : 1;
    state.read = share < 0.999 ? Math.floor(share * 5) : 5;
    id("folder").textContent = found.folder.split("/").pop();
    id("folder").title = found.folder;
    const running = found.runs.filter((run) => run.status === "running").length;
    say([`${found.runs.length} runs`, running ? `${running} running` : "", share < 0.999 ? `reading metrics: ${Math.floor(100 * share)}%, samples until then` : ""].filter(Boolean).join(" · "));
    drawTable();
    drawCharts();
  }

  async function keepFresh() {
    if (id("live").checked && !document.hidden) {
      try { await refresh(); } catch (error) { say(`no answer from weft ui (${error.message})`); }
    }
    setTimeout(keepFresh, REFRESH_MS);
  }

  function show(view) {
    for (const button of document.querySelectorAll("[data-view]")) {
      button.setAttribute("aria-pressed", String(button.dataset.view === view));
      id(button.dataset.view).hidden = button.dataset.view !== view;
    }
    document.dispatchEvent(new CustomEvent("view", { detail: view }));
  }

  for (const button of document.querySelectorAll("[data-view]")) button.onclick = () => show(button.dataset.view);
  id("filter").oninput = drawTable;
  for (const name of ["over", "log-x"]) id(name).onchange = () => { for (const chart of state.charts.values()) chart.range = null; drawCharts(); };
  for (const name of ["log-y", "perplexity"]) id(name).onchange = drawCharts;
  id("smoothing").oninput = drawCharts;
  dark.addEventListener("change", drawCharts);
  refresh().catch((error) => say(error.message));
  setTimeout(keepFresh, REFRESH_MS);
  return { plotly, ask, id, element, colour, bytes, seconds, short, percent, COLOURS };
})();
