"use strict";
// The figures have no colours for text and grid; these are taken from the page. Each figure is drawn when it is about to become visible.
const figures = JSON.parse(document.getElementById("figures").textContent);
const drawn = new Set();
const axisNames = /^[xy]axis\d*$/;

function themed(layout) {
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), tickcolor: colour("--line") };
  const result = { ...layout, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--soft") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } } };
  // On touch screens, a finger that moves over a chart scrolls the page.
  if (window.matchMedia("(pointer: coarse)").matches) result.dragmode = false;
  for (const name of Object.keys(layout).filter(name => axisNames.test(name)))
    result[name] = { ...layout[name], ...axis, ...(name[0] === "x" && { showline: true }) };
  return result;
}

// A page may define a function `shown`, which returns the figure to draw in place of the given one.
function draw(id) {
  drawn.add(id);
  const figure = typeof shown === "function" ? shown(figures[id]) : figures[id];
  Plotly.react(id, figure.data, themed(figure.layout), { responsive: true, displayModeBar: false });
}

function drawAgain() { drawn.forEach(draw); }

const near = new IntersectionObserver(entries => {
  for (const entry of entries.filter(entry => entry.isIntersecting)) {
    near.unobserve(entry.target);
    draw(entry.target.id);
  }
}, { rootMargin: "300px" });
for (const id of Object.keys(figures)) near.observe(document.getElementById(id));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
window.addEventListener("beforeprint", () => Object.keys(figures).forEach(draw));
