"use strict";
// Selects the runs that are shown, and the horizontal axis.
const clocks = JSON.parse(document.getElementById("clocks").textContent);
const boxes = [...document.querySelectorAll("input[name=run]")];
const axisForm = document.getElementById("axis");

// Hours from the start to the end of a step, interpolated linearly between the known steps.
function hoursAt(run, step) {
  const { steps, hours } = clocks[run];
  const next = steps.findIndex(known => known >= step);
  if (next < 0) return hours[hours.length - 1];
  if (next === 0 || steps[next] === step) return hours[next];
  const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
  return hours[next - 1] + share * (hours[next] - hours[next - 1]);
}

// Called by charts.js for each figure that it draws.
function shown(figure) {
  const hidden = new Set(boxes.filter(box => !box.checked).map(box => Number(box.value)));
  const byHours = axisForm.elements.axis.value === "hours";
  const data = figure.data.map(trace => ({ ...trace, visible: !hidden.has(trace.meta),
    x: byHours ? trace.x.map(step => hoursAt(trace.meta, step)) : trace.x }));
  const xaxis = { ...figure.layout.xaxis, title: { ...figure.layout.xaxis.title, text: byHours ? "hours" : "step" } };
  return { data, layout: { ...figure.layout, xaxis } };
}

if (!clocks.length) axisForm.hidden = true;
axisForm.addEventListener("submit", event => event.preventDefault());
for (const one of [...boxes, axisForm]) one.addEventListener("change", drawAgain);
