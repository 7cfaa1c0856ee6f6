/* The first drawing of curves, on a canvas, while plotly is not loaded yet: its parsing and its first drawing take longer
   than all else on the page. The same traces in the same ranges; zoom, hover and logarithmic axes come with plotly. */
"use strict";
const quick = (function () {
  const LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 42, TICK_PIXELS = 90;

  function range(traces, key) {
    let low = Infinity, high = -Infinity;
    for (const trace of traces) for (const value of trace[key]) { if (value < low) low = value; if (value > high) high = value; }
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  function ticks(low, high, most) {
    const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const found = [];
    for (let place = Math.ceil(low / step); place * step <= high; place += 1) found.push(Number((place * step).toPrecision(10)));
    return found;
  }

  function words(value) {
    return Math.abs(value) >= 1e4 ? Intl.NumberFormat("en", { notation: "compact" }).format(value).replace("K", "k") : String(value);
  }

  /* Draws into `box`; what was there goes. `titles`: of both axes; `colours`: of text and grid. */
  function draw(box, traces, titles, colours) {
    const canvas = Object.assign(document.createElement("canvas"), { className: "quick" });
    const [width, height, scale] = [box.clientWidth, box.clientHeight, window.devicePixelRatio || 1];
    Object.assign(canvas, { width: width * scale, height: height * scale });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const [left, right] = range(traces, "x"), [bottom, top] = range(traces, "y"), margin = (top - bottom) * 0.05;
    const [inside, tall] = [width - LEFT - RIGHT, height - TOP - BOTTOM];
    const x = (value) => LEFT + (value - left) / (right - left) * inside;
    const y = (value) => TOP + (top + margin - value) / (top - bottom + 2 * margin) * tall;
    Object.assign(pen, { font: "12px system-ui, sans-serif", fillStyle: colours.text, strokeStyle: colours.grid, textAlign: "right", textBaseline: "middle" });
    for (const value of ticks(bottom - margin, top + margin, tall / 60)) {
      pen.fillText(words(value), LEFT - 6, y(value));
      pen.beginPath(); pen.moveTo(LEFT, y(value)); pen.lineTo(width - RIGHT, y(value)); pen.stroke();
    }
    Object.assign(pen, { textAlign: "center", textBaseline: "top" });
    for (const value of ticks(left, right, inside / TICK_PIXELS)) pen.fillText(words(value), x(value), TOP + tall + 6);
    pen.fillText(titles[0], LEFT + inside / 2, height - 18);
    pen.save(); pen.translate(4, TOP + tall / 2); pen.rotate(-Math.PI / 2); pen.fillText(titles[1], 0, 0); pen.restore();
    for (const trace of traces) {
      Object.assign(pen, { strokeStyle: trace.line.color, fillStyle: trace.line.color, lineWidth: trace.line.width, globalAlpha: trace.opacity ?? 1 });
      pen.beginPath();
      trace.x.forEach((value, place) => pen[place ? "lineTo" : "moveTo"](x(value), y(trace.y[place])));
      pen.stroke();
      if (trace.mode === "markers") pen.fillRect(x(trace.x[0]) - 3, y(trace.y[0]) - 3, 6, 6);
    }
    box.replaceChildren(canvas);
  }

  return { draw };
})();
