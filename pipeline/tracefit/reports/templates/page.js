"use strict";
// Draw each figure when it comes near the screen, in the colours of the page; on paper, all of them in light ones.
(() => {
  const { figures, templates, config } = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const narrow = matchMedia("(max-width: 40rem)");
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = new Set();
  let printing = paper.matches;

  const template = () => templates[dark.matches && !printing ? "dark" : "light"];

  function draw(plot) {
    if (drawn.has(plot)) return;
    drawn.add(plot);
    const { data, layout } = figures[plot.dataset.figure];
    // A finger that drags moves the page; a mouse that drags zooms.
    const dragmode = narrow.matches ? false : "zoom";
    const width = printing ? paperWidth(plot) : undefined;
    const height = layout.height + (narrow.matches ? legendRows(data, layout) * 14 : 0);
    plot.style.height = `${height}px`;
    const options = { ...config, displayModeBar: !narrow.matches };
    Plotly.newPlot(plot, data, { ...layout, dragmode, width, height, template: template() }, options);
  }

  // On a narrow screen a legend takes a row for nearly every entry: room for data must not shrink by it.
  function legendRows(data, layout) {
    return [...data, ...(layout.shapes || []).filter((shape) => shape.showlegend)].length;
  }

  function paperWidth(plot) {
    return plot.closest(".wide") ? 680 : 330;
  }

  function restyle() {
    for (const plot of drawn) {
      const width = printing ? { width: paperWidth(plot) } : { width: null, autosize: true };
      Plotly.relayout(plot, { template: template(), ...width });
    }
  }

  function print(begins) {
    if (printing === begins) return;
    printing = begins;
    restyle();
    if (begins) plots.forEach(draw);
  }

  dark.addEventListener("change", restyle);
  paper.addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));

  if (printing) plots.forEach(draw);
  const near = new IntersectionObserver(
    (entries) => entries.forEach((entry) => {
      if (!entry.isIntersecting) return;
      near.unobserve(entry.target);
      draw(entry.target);
    }),
    { rootMargin: "600px" },
  );
  plots.forEach((plot) => near.observe(plot));

  // A link into a folded section opens it.
  function unfold() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const section = target && target.closest("details");
    if (section) { section.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", unfold);
  unfold();
})();
