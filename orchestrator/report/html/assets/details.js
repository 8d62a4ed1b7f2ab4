// Partition, runtime, privacy account, failures, provenance.

function partitions(study) {
  if (!study.partitions.length) return [el("p", {}, "The ledger has no record of the partition.")];
  const holder = el("div");
  const draw = () => {
    const found = study.partitions[Number(recall("partition"))], sizes = found.counts.map((row) => row.reduce((a, b) => a + b, 0));
    const classes = found.counts[0].length;
    holder.replaceChildren(
      el("p", {}, `${sizes.length} clients hold ${Math.min(...sizes)} to ${Math.max(...sizes)} train rows, ${short(mean(sizes))} on average. `,
        found.divergence && `KL divergence of their class distributions from uniform: ${short(mean(found.divergence), 3)} nats on average, ${short(Math.max(...found.divergence), 3)} at most.`),
      classes > 1 && el("div", { class: "legend" }, Array.from({ length: classes }, (_, k) => el("span", {}, svg("svg", { width: 14, height: 12, "aria-hidden": "true" }, svg("rect", { width: 14, height: 12, ...classLook(k) })), classOf(found, k)))),
      drawn((width) => partitionPanel(found, sizes, width), { class: "chart wide" }),
      classes > 1 && table({ name: "partition", title: "Train rows by client and class", columns: ["Client", ...Array.from({ length: classes }, (_, k) => found.classes[k] ?? `Class ${k}`), "Total", "Divergence"], align: (found.clients.length ? "l" : "r") + "r".repeat(classes + 2),
        groups: [{ heading: "", rows: found.counts.map((row, k) => [found.clients[k] ?? String(k), ...row.map(String), String(sizes[k]), short(found.divergence[k], 3)]) }] }));
  };
  const controls = el("div", { class: "controls" }, choice("partition", "Setting", study.partitions.map((p, k) => [k, `${p.setting}, partition seed ${p.seed}`]), draw));
  draw();
  return [controls, holder];
}

const classOf = (found, k) => found.classes[k] ?? `class ${k}`;
const clientOf = (found, k) => found.clients[k] ?? `client ${k}`;
const classLook = (k) => ({ style: { fill: `var(--series-${k % 8})` }, "fill-opacity": k < 8 ? 1 : 0.5 });

const LONGEST_NAME = 24; // characters beside the bars; the cursor shows the whole name

function partitionPanel(found, sizes, width) {
  const { counts } = found, names = counts.map((_, k) => clientOf(found, k)), cut = (name) => name.length > LONGEST_NAME ? `${name.slice(0, LONGEST_NAME - 1)}…` : name;
  const high = Math.max(4, Math.min(20, 480 / counts.length)), left = 6 + 7 * Math.max(8, ...names.map((name) => cut(name).length)), most = Math.max(...sizes), inner = width - left - 52;
  const root = svg("svg", { viewBox: `0 0 ${width} ${counts.length * high + 6}`, role: "img", "aria-label": `Train rows by class for ${counts.length} clients` });
  const points = [];
  counts.forEach((row, client) => {
    let x = left;
    row.forEach((count, k) => {
      const wide = (count / most) * inner;
      if (wide > 0) root.append(svg("rect", { class: "part", x, y: client * high + 1, width: wide, height: high - 2, ...classLook(k) }));
      x += wide;
    });
    if (high >= 12) root.append(svg("text", { class: "tick", x: left - 6, y: client * high + high / 2 + 4, "text-anchor": "end" }, cut(names[client])), svg("text", { class: "tick", x: x + 5, y: client * high + high / 2 + 4 }, sizes[client]));
    points.push({ x: left + 4, y: client * high + high / 2, client });
    if (x > left + 120) points.push({ x, y: client * high + high / 2, client }, { x: (x + left) / 2, y: client * high + high / 2, client });
  });
  return cursor(root, points, ({ client }) => [`${names[client]}: ${sizes[client]} rows`, counts[client].length > 1 ? counts[client].map((count, k) => `${classOf(found, k)}: ${count}`).join(", ") : ""]);
}

// ---- runtime

function runtime(study) {
  const { time } = study.status, ended = study.sessions.flatMap((session) => session.ended);
  const spent = (cell) => [...cell.search.seconds, ...cell.confirm.map((run) => run.seconds)].reduce((a, b) => a + b, 0);
  const methods = study.methods.map((method) => ({ name: method, value: study.cells.filter((cell) => cell.method === method).reduce((sum, cell) => sum + spent(cell), 0) }));
  return [
    el("p", {}, time.elapsed_s === null ? "The ledger has no times of its trials." : `${duration(time.elapsed_s)} in ${study.sessions.length} session${study.sessions.length === 1 ? "" : "s"}` +
      `${time.trial_rounds_per_second === null ? "" : `, ${short(time.trial_rounds_per_second)} trial-rounds per second most recently`}.`),
    ended.length > 1 && el("figure", {}, el("figcaption", {}, "Trials ended"), drawn((width) => progressPanel(study, width), { class: "chart wide" })),
    el("figure", {}, el("figcaption", {}, "Compute time of all trials, by method"), bars(methods.map((row) => ({ ...row, text: duration(row.value) })), "Compute time by method")),
    tablesOf(study, (found) => found.kind === "timing"),
  ];
}

function progressPanel(study, width) {
  const points = [];
  let worked = 0, ended = 0;
  for (const session of study.sessions) {
    points.push({ s: worked, n: ended });
    for (const [at, count] of session.ended) points.push({ s: worked + at - session.began, n: ended + count });
    if (session.ended.length) [worked, ended] = [points.at(-1).s, points.at(-1).n];
  }
  const unit = worked > 5400 ? [3600, "h"] : worked > 120 ? [60, "min"] : [1, "s"];
  const { root, sx, sy } = frame({ width, height: 230, label: "Trials ended over time", x: { domain: [0, Math.max(1, worked) / unit[0]], label: `${unit[1]} of run time (without pauses between sessions)` }, y: { domain: [0, ended], label: "trials" } });
  root.append(svg("path", { class: "series", stroke: "var(--series-0)", d: path(points.map((p) => [sx(p.s / unit[0]), sy(p.n)])) }));
  return cursor(root, points.map((p) => ({ x: sx(p.s / unit[0]), y: sy(p.n), p })), ({ p }) => [`${p.n} trials after ${duration(p.s)}`]);
}

// ---- privacy

function privacy(study) {
  const p = study.privacy;
  return [
    el("p", {}, `Claims are for δ = ${short(p.delta)} and ${p.level === "user" ? "one client with all its records" : "one record of one client"}, adjacency ${p.adjacency}, against an observer of the ${p.release} release.`),
    tablesOf(study, (found) => found.kind === "privacy"),
  ];
}

// ---- failures and divergences

function failures(study) {
  const { failed, retries } = study.status;
  const lost = study.cells.map((cell) => [cell.id, ...["diverged", "failed"].map((state) => String(cell.states[state] || 0)),
    cell.confirm.filter((run) => run.state !== "done").map((run) => `seed ${run.seed} ${run.state}`).join(", ") || "–"]).filter((row) => row.slice(1, 3).some((count) => count !== "0") || row[3] !== "–");
  const where = study.cells.flatMap((cell) => cell.search.state.map((state, k) => [state, k]).filter(([state]) => state === "diverged" || state === "failed").map(([state, k]) =>
    [cell.id, state, cell.search.axes.map((axis, n) => `${axis.name} = ${short(cell.search.values[n][k])}`).join(", ")]));
  if (!lost.length && !retries.length && !Object.keys(failed).length) return [el("p", {}, "No trial failed, diverged or was retried.")];
  return [
    lost.length > 0 && table({ name: "lost", title: "Diverged and failed trials", caption: ["Diverged: the weights became infinite. Failed: the trial could not run."], columns: ["Cell", "Diverged", "Failed", "Confirm runs"], align: "lrrl", groups: [{ heading: "", rows: lost }] }),
    where.length > 0 && table({ name: "where", title: "Configurations that diverged or failed", columns: ["Cell", "State", "Configuration"], align: "lll", groups: [{ heading: "", rows: where }] }),
    Object.keys(failed).length > 0 && table({ name: "failed", title: "Failed trials", columns: ["Trial", "Reason"], align: "ll", groups: [{ heading: "", rows: Object.entries(failed) }] }),
    retries.length > 0 && table({ name: "retries", title: "Retried packs", caption: ["Their trials finished on a retry, unless they are listed above."], columns: ["Trials", "First trial", "Reason"], align: "rll", groups: [{ heading: "", rows: retries.map((r) => [String(r.trials), r.first, r.reason]) }] }),
  ];
}

// ---- provenance

function provenance(study) {
  const { source, fingerprints, engine, plugins } = study.provenance, { seeds } = study;
  const facts = [["Study", study.study], ["Program", `fedsweep ${page.version}, engine ${engine}`],
    ["Search seeds", [seeds.search].flat().join(", ")], ...(seeds.contest.length && !study.private ? [["Contest seeds", seeds.contest.join(", ")]] : []),
    ["Confirm seeds", study.private ? "secret" : seeds.confirm.join(", ")], ["Partition seed", String(seeds.partition)],
    ...(plugins.length ? [["Plug-ins", plugins.map(name => name.split("/").pop()).join(", ")]] : []),
    ...Object.entries(fingerprints).map(([label, fingerprint]) => [`Data ${label}`, fingerprint]),
    ...study.sessions.map((session, k) => [`Session ${k + 1}`, `began ${moment(session.began)}${session.ended.length ? `, last result ${moment(session.ended.at(-1)[0])}` : ""}`])];
  return [el("dl", {}, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("p", {}, "Everything on this page is computed from the ledger; the same ledger gives the same page. The study file:"),
    el("pre", { tabindex: "0", "aria-label": "The study file" }, source),
    el("p", {}, el("button", { type: "button", onclick: () => copy(source, "Study file") }, "Copy study file"))];
}
