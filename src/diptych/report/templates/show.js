// Draws every figure from its JSON, in the colours of the page, and again when the scheme changes.
"use strict";
const coarse = matchMedia("(pointer: coarse)").matches;
const scheme = matchMedia("(prefers-color-scheme: dark)");

function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    "font.color": read("--muted"),
    "hoverlabel.bgcolor": read("--card"),
    "hoverlabel.bordercolor": read("--line"),
    "hoverlabel.font.color": read("--ink"),
  };
}

for (const place of document.querySelectorAll("[data-figure]")) {
  const text = document.getElementById(place.dataset.figure).textContent;
  const figure = JSON.parse(text);
  // A finger that scrolls the page must not zoom a figure.
  if (coarse) figure.layout.dragmode = false;
  figure.layout.autosize = true;
  Plotly.newPlot(place, figure.data, figure.layout, {
    responsive: true,
    displayModeBar: false,
  }).then(() => Plotly.relayout(place, colours()));
  scheme.addEventListener("change", () => Plotly.relayout(place, colours()));
}
