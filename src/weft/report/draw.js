/* Hands each figure of the page to plotly, in the theme of the reader. Figures come in light colours; dark is a swap. */
(function () {
  "use strict";
  var PRINT_WIDTH = 680; // pixels: an A4 or Letter page between its margins
  var darkOf = read("palette");
  var prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  var isTouch = window.matchMedia("(pointer: coarse)").matches;
  var config = { responsive: true, displayModeBar: false }; // drag zooms, a double click resets

  function read(id) {
    return JSON.parse(document.getElementById(id).textContent);
  }

  function darken(value) {
    if (typeof value === "string") return Object.hasOwn(darkOf, value) ? darkOf[value] : value;
    if (Array.isArray(value)) return value.map(darken);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(function (pair) { return [pair[0], darken(pair[1])]; }));
  }

  function draw(isDark, width) {
    document.querySelectorAll("[data-figure]").forEach(function (box) {
      var figure = read(box.dataset.figure);
      if (isDark) figure = darken(figure);
      if (isTouch) figure.layout.dragmode = false; // a finger on a chart scrolls the page instead of zooming
      if (width) figure.layout.width = width;
      Plotly.react(box, figure.data, figure.layout, config);
    });
  }

  function drawScreen() { draw(prefersDark.matches); }

  drawScreen();
  prefersDark.addEventListener("change", drawScreen);
  window.addEventListener("beforeprint", function () { draw(false, PRINT_WIDTH); });
  window.addEventListener("afterprint", drawScreen);
})();
