// The expected score at any budget, by the surfaces of a study, and where the surfaces were wrong.

function frontier(study) {
  if (!study.surfaces.length) return null;
  const holder = el("div"), strategy = "surface";
  const draw = () => {
    const mine = study.surfaces.filter((surface) => surface.setting === recall("frontier-setting") && shown({ method: surface.method, strategy }));
    holder.replaceChildren(drawn((width) => frontierPanel(study, mine, strategy, width), { class: "chart wide" }),
      note("Expected validation score of the best configuration; the band is two standard deviations. Marks: searched budgets.", "frontier",
        "Hollow circles are means of contest candidates. Whiskers: from what the surface of the search predicted for them. ",
        "fedsweep frontier answers for other δ, rounds and release models."),
      el("div", {}, mine.filter((surface) => surface.finalists.length).map((surface) => wrongness(study, surface))));
  };
  const settings = distinct(study.surfaces.map((surface) => surface.setting));
  const controls = el("div", { class: "controls" }, choice("frontier-setting", "Setting", settings.map((s) => [s, s]), draw));
  const keys = keysOf(study).filter((key) => key.strategy === strategy && study.surfaces.some((surface) => surface.method === key.method));
  draw();
  return [controls, legend(study, keys, draw), holder];
}

function frontierPanel(study, surfaces, strategy, width) {
  const height = Math.round(Math.max(240, Math.min(380, width * 0.5)));
  const all = surfaces.flatMap((surface) => surface.points), domain = extent(all.map((p) => p.epsilon));
  const range = extent([...all.flatMap((p) => [p.score - 2 * p.deviation, p.score + 2 * p.deviation]), ...surfaces.flatMap((s) => s.finalists.map((f) => f.score))]);
  if (!domain) return el("p", { class: "note" }, "Nothing to show.");
  const { root, sx, sy } = frame({ width, height, label: `Expected validation ${study.objective.title} against ε: ${surfaces.map((s) => s.method).join(", ")}`,
    x: { domain: [domain[0] / 1.15, domain[1] * 1.15], kind: "log", label: "ε (logarithmic)" },
    y: { domain: padded(range), label: `validation ${study.objective.title}${study.objective.unit}` } });
  const points = [];
  for (const surface of surfaces) {
    const colour = colourOf(study, surface.method, strategy);
    const edge = (list, side) => list.map((p) => [sx(p.epsilon), sy(p.score + side * 2 * p.deviation)]);
    root.append(svg("path", { class: "band", d: path([...edge(surface.points, 1), ...edge(surface.points.toReversed(), -1)]) + "Z", fill: colour }));
    for (const f of surface.finalists) {
      const x = sx(f.epsilon);
      root.append(svg("line", { class: "whisker", x1: x, x2: x, y1: sy(f.predicted), y2: sy(f.score), stroke: colour, "stroke-opacity": 0.5 }),
        mark("o", x, sy(f.score), 2.6, { fill: "var(--ground)", stroke: colour }));
    }
    root.append(seriesLine(study, surface.method, strategy, surface.points.map((p) => [sx(p.epsilon), sy(p.score)])));
    for (const p of surface.points) {
      if (p.searched) root.append(mark(markerOf(study, surface.method, strategy), sx(p.epsilon), sy(p.score), 4, inked(study, surface.method, strategy)));
      points.push({ x: sx(p.epsilon), y: sy(p.score), p, surface });
    }
  }
  return cursor(root, points, ({ p, surface }) => [`${surface.method}, ${budget(p.epsilon)}${p.searched ? "" : ", not searched"}`,
    `${scored(study, p.score)} ± ${scored(study, 2 * p.deviation)}, noise multiplier ${short(p.noise, 4)}`,
    ...surface.axes.map((name, k) => `${name} = ${short(p.values[k])}`)]);
}

function wrongness(study, surface) {
  const rows = surface.finalists.map((f) => [short(f.epsilon), ...f.values.map((value) => short(value, 6)), `${scored(study, f.predicted)} ± ${scored(study, 2 * f.deviation)}`,
    `${scored(study, f.score)}${isNumber(f.error) ? ` ± ${scored(study, 2 * f.error)}` : ""}`, scored(study, f.predicted - f.score)]);
  return table({ name: `finalists-${surface.setting}-${surface.method}`, title: `Contest of ${surface.method}: predicted and measured`,
    caption: ["Predicted by the surface of the search, before the contest.", "± is two standard deviations of the prediction, and two standard errors of the measured mean."],
    columns: ["ε", ...surface.axes, `Predicted${study.objective.unit}`, `Measured${study.objective.unit}`, "Difference"],
    align: `r${"r".repeat(surface.axes.length)}rrr`, groups: [{ heading: "", rows }] });
}
