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

  // A rate and an objective that are moved: numbers come from the curves that are drawn, straight between their points.
  const written = (value) => value >= 1000 ? Math.round(value).toLocaleString("en") : `${Number(value.toPrecision(3))}`;
  const between = (low, high, share) => Math.exp(Math.log(low) + share * (Math.log(high) - Math.log(low)));

  function explore(form) {
    const name = form.dataset.figure;
    const { rates, values, outside, limits, axes } = figures[name].curves;
    const { rate, percentile, limit, latencies, largest } = form.elements;
    const last = rates.length - 1;

    function latencyAt(points, at) {
      const k = Math.min(Math.max(rates.findIndex((one) => one > at) - 1, 0), last - 1);
      const place = at >= rates[last] ? last - 1 : k;
      return between(points[place], points[place + 1], (at - rates[place]) / (rates[place + 1] - rates[place]));
    }

    // The rate at which a line first leaves its limit; null where it never does.
    function firstAbove(points, most) {
      if (points[0] > most) return 0;
      const k = points.findIndex((value) => value > most);
      if (k < 0) return null;
      const share = Math.log(most / points[k - 1]) / Math.log(points[k] / points[k - 1]);
      return rates[k - 1] + share * (rates[k] - rates[k - 1]);
    }

    const isOutside = (at) => rates.some((one, k) => k < last && one <= at && at <= rates[k + 1] && (outside[k] || outside[k + 1]));
    const beyond = (at) => isOutside(at) ? ", on steps unlike those of the training" : "";

    function show() {
      const at = Number(rate.value);
      const labels = [...percentile.options].map((option) => option.value);
      const parts = labels.map((label) => [label.split(" "), written(latencyAt(values[label], at))]);
      const groups = [...new Set(parts.map(([[latency]]) => latency))];
      const texts = groups.map((latency) =>
        `${latency} ${parts.filter(([[of]]) => of === latency).map(([, value]) => value).join(" / ")}`);
      latencies.value = `${written(at)} requests/s: ${texts.join(", ")} ms (P50 / P90 / P99)${beyond(at)}`;
      const most = limit.valueAsNumber;
      const isSet = most > 0;
      const end = isSet ? firstAbove(values[percentile.value], most) : null;
      const until = end === null ? `up to ${written(rates[last])} requests/s, the most it serves${beyond(rates[last])}`
        : end === 0 ? "at none of these rates" : `up to ${written(end)} requests/s${beyond(end)}`;
      largest.value = isSet ? `${percentile.value} is within ${written(most)} ms ${until}` : "";
      const [moved, bound, ...others] = figures[name].layout.shapes;
      Object.assign(moved, { x0: at, x1: at });
      // On a logarithmic axis a shape's place is in its own units, as on a linear one.
      Object.assign(bound, { visible: isSet, yref: axes[percentile.value], xref: "paper", ...(isSet ? { y0: most, y1: most } : {}) });
      const plot = document.querySelector(`.plot[data-figure="${name}"]`);
      if (drawn.has(plot)) Plotly.relayout(plot, { shapes: [moved, bound, ...others] });
    }

    const [[asked, ms] = []] = Object.entries(limits);
    if (asked) Object.assign(percentile, { value: asked }), limit.value = ms;
    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    show();
  }
  document.querySelectorAll(".explore").forEach(explore);

  // A link into a folded section opens it.
  function unfold() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const section = target && target.closest("details");
    if (section) { section.open = true; foldOthers(section); target.scrollIntoView(); }
  }
  // Of the deployments one is open at a time: they are long, and look alike.
  const choices = [...document.querySelectorAll(".choice")];
  const foldOthers = (chosen) => { if (choices.includes(chosen)) choices.forEach((one) => { if (one !== chosen) one.open = false; }); };
  choices.forEach((one) => one.querySelector("summary").addEventListener("click", () => foldOthers(one)));
  addEventListener("hashchange", unfold);
  unfold();
})();
