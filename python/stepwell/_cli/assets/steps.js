// A root: its steps over time, sizes, metrics, and what retention would do.

const CHARTS = 12;

function rootHead(root) {
  const steps = root.steps;
  const newest = steps.at(-1);
  const facts = [["steps", counted(steps.length)], ["newest", newest ? String(newest.step) : "none"], ["all steps", size(steps.reduce((sum, step) => sum + step.bytes, 0))]];
  if (steps.length > 1) facts.push(["from", when(steps[0].committed)], ["to", when(newest.committed)]);
  const made = part("The run", tiles(facts));
  const tell = (kind, text) => made.append(el("p", { class: kind }, text));
  for (const step of steps) if (step.damage !== null) tell("bad", `step ${step.step} is damaged: ${step.damage}`);
  for (const one of root.quarantined) tell("bad", `${one.name} has a step's name and is none: ${one.reason}`);
  for (const one of root.temporaries) tell("muted", `${one.name}: ${one.live ? "a save in flight" : "left by a killed save"}, ${size(one.bytes)}`);
  for (const one of root.trash) tell("muted", `${one.name}: retired, ${size(one.bytes)}`);
  for (const one of root.branches) tell("muted", `branch ${one.branch}: ${one.steps.map((step) => step.label).join(", ")}, kept by a rewind`);
}

function stepCharts(root) {
  const steps = root.steps;
  if (!steps.length) return;
  const weights = new Map();
  for (const step of steps) for (const item of step.items) weights.set(item.name, (weights.get(item.name) || 0) + item.bytes);
  const colours = palette(weights);
  const names = [...colours.keys()];
  const most = Math.max(...steps.map((step) => step.bytes), 1);
  const deleted = (step) => step.decision === "delete";
  const { canvas } = drawing(150, (g, width, height) => {
    const tints = new Map([...colours].map(([name, c]) => [name, colour(c)]));
    const slot = width / steps.length;
    const wide = Math.min(Math.max(slot * 0.8, 0.5), 42);
    g.font = "11px system-ui, sans-serif";
    steps.forEach((step, i) => {
      let y = height - 16;
      const x = slot * i + (slot - wide) / 2;
      g.globalAlpha = deleted(step) ? 0.25 : 1;
      for (const name of names) {
        const item = step.items.find((one) => one.name === name);
        if (!item) continue;
        const kept = step.decision !== "thin" || step.kept.includes(name);
        g.globalAlpha = deleted(step) || !kept ? 0.25 : 1;
        const h = (item.bytes / most) * (height - 26);
        g.fillStyle = tints.get(name);
        g.fillRect(x, y - h, wide, h);
        y -= h;
      }
      g.globalAlpha = 1;
      if (step.damage !== null) {
        g.fillStyle = colour("bad");
        g.fillRect(x, 0, wide, 4);
      }
    });
    const every = Math.ceil(steps.length / Math.max(1, Math.floor(width / 70)));
    g.fillStyle = colour("muted");
    g.textAlign = "center";
    steps.forEach((step, i) => {
      if (i % every === 0) g.fillText(String(step.step), Math.max(slot * (i + 0.5), 12), height - 3);
    });
  });
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const step = steps[Math.min(steps.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * steps.length)))];
    const items = step.items.map((item) => `${item.name} ${size(item.bytes)}`).join(", ");
    const fate = step.decision ? `\n${step.decision}: ${step.why}` : "";
    showTip(event, `step ${step.step}, ${when(step.committed)}\n${size(step.bytes)}: ${items}${fate}`);
  });
  const faded = root.retention === null ? "" : ` What retention (${root.retention}) would remove is faded.`;
  part("Sizes of the steps", canvas, legend(colours), el("p", { class: "muted" }, `Bytes of each step, by item.${faded}`));
}

function metricCharts(root) {
  const weights = new Map();
  for (const step of root.steps) for (const name of Object.keys(step.metrics)) weights.set(name, (weights.get(name) || 0) + 1);
  const names = [...weights.entries()].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).map(([name]) => name);
  if (!names.length) return;
  const box = el("div", { class: "charts" });
  for (const name of names.slice(0, CHARTS)) box.append(metricChart(name, root.steps.filter((step) => name in step.metrics)));
  part("Metrics", box, names.length > CHARTS ? el("p", { class: "muted" }, `${names.length - CHARTS} more are in the table below`) : null);
}

function metricChart(name, steps) {
  const points = steps.map((step) => ({ step: step.step, value: real(step.metrics[name]) }));
  const finite = points.filter((point) => Number.isFinite(point.value));
  const [low, high] = [Math.min(...finite.map((p) => p.value)), Math.max(...finite.map((p) => p.value))];
  const [first, last] = [points[0].step, points.at(-1).step];
  const at = (point, width, height) => [
    6 + ((point.step - first) / Math.max(last - first, 1)) * (width - 12),
    height - 6 - ((point.value - low) / (high - low || 1)) * (height - 12),
  ];
  const { canvas } = drawing(80, (g, width, height) => {
    g.strokeStyle = colour("accent");
    g.fillStyle = colour("accent");
    g.lineWidth = 1.5;
    g.beginPath();
    let open = false;
    for (const point of points) {
      if (!Number.isFinite(point.value)) {
        open = false;
        continue;
      }
      const [x, y] = at(point, width, height);
      if (open) g.lineTo(x, y);
      else g.moveTo(x, y);
      open = true;
    }
    g.stroke();
    if (finite.length <= 60) {
      for (const point of finite) {
        const [x, y] = at(point, width, height);
        g.beginPath();
        g.arc(x, y, 2, 0, 7);
        g.fill();
      }
    }
  });
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const step = first + ((event.clientX - box.left - 6) / (box.width - 12)) * (last - first);
    const near = points.reduce((best, point) => (Math.abs(point.step - step) < Math.abs(best.step - step) ? point : best));
    showTip(event, `step ${near.step}: ${name} ${figure(near.value)}`);
  });
  const range = finite.length ? `${figure(low)} … ${figure(high)}` : "no finite value";
  const missing = points.length - finite.length;
  return el("div", { class: "chart" }, el("h3", {}, el("span", { title: name }, name), el("span", {}, figure(points.at(-1).value))), canvas,
    el("span", { class: "muted" }, range + (missing ? `, ${missing} not finite` : "")));
}

function stepTable(root) {
  if (!root.steps.length) return;
  const columns = [
    { label: "step", width: "80px", number: true, text: (step) => String(step.step), value: (step) => step.step },
    { label: "committed", width: "150px", text: (step) => when(step.committed), value: (step) => step.committed },
    { label: "size", width: "90px", number: true, text: (step) => size(step.bytes), value: (step) => step.bytes },
    { label: "items", width: "minmax(120px, 1.4fr)", text: (step) => [...step.items.map((item) => item.name), ...step.dropped.map((item) => `−${item}`)].join(" "), value: (step) => step.items.length },
    { label: "metrics", width: "minmax(120px, 2fr)", text: (step) => Object.entries(step.metrics).map(([name, value]) => `${name} ${figure(value)}`).join(", "), value: (step) => Object.keys(step.metrics).length },
  ];
  if (root.retention !== null) {
    const tint = { keep: "good", thin: "warn", delete: "bad" };
    columns.push(
      { label: "retention", width: "90px", text: (step) => step.decision ?? "", value: (step) => step.decision ?? "", class: (step) => tint[step.decision] ?? "" },
      { label: "why", width: "minmax(120px, 2fr)", text: (step) => step.why ?? "", value: (step) => step.why ?? "" },
    );
  }
  const table = grid(columns, root.steps, { height: 340, sort: 0, descending: true });
  const freed = root.retention === null ? null : el("p", {}, root.retention_summary);
  part("Steps", freed, table.box);
}
