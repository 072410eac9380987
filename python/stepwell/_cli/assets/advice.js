// The share of a run's time that each interval of saves loses, with the best one and the present one.

const TIMES = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

function length(seconds) {
  const [unit, long] = TIMES.find(([, one]) => seconds >= 2 * one) ?? TIMES.at(-1);
  return `${+(seconds / long).toPrecision(3)} ${unit}`;
}

// The values of an axis from 0 to `most`: multiples of 1, 2 or 5 in a decade, about five of them.
function ticks(most) {
  const decade = 10 ** Math.floor(Math.log10(most / 5));
  const step = [1, 2, 5, 10].map((one) => one * decade).find((one) => most / one < 6);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

function adviceChart(advice) {
  const run = advice.measured;
  const percent = (lost) => `${(100 * lost).toFixed(2)} %`;
  const marks = [["best", advice.interval_seconds, advice.lost, "good"]];
  if (run.interval_seconds !== null) marks.push(["now", run.interval_seconds, advice.lost_now, "warn"]);
  const points = advice.curve;
  const most = Math.min(1, 1.1 * Math.max(advice.lost_now ?? 0, 4 * advice.lost));
  const [low, high] = [Math.log(points[0][0]), Math.log(points.at(-1)[0])];
  const left = 46; // of the curve: the labels of the axis are before it
  const across = (seconds, width) => left + ((Math.log(seconds) - low) / (high - low)) * (width - left);
  const { canvas } = drawing(180, (g, width, height) => {
    const down = (lost) => height - 18 - (Math.min(lost, most) / most) * (height - 30);
    g.font = "11px system-ui, sans-serif";
    g.textAlign = "right";
    for (const lost of ticks(most)) {
      g.fillStyle = colour("line");
      g.fillRect(left, down(lost), width - left, 1);
      g.fillStyle = colour("muted");
      g.fillText(`${+(100 * lost).toPrecision(2)} %`, left - 6, down(lost) + 4);
    }
    g.lineWidth = 1.5;
    g.strokeStyle = colour("accent");
    g.beginPath();
    for (const [seconds, lost] of points) g.lineTo(across(seconds, width), down(lost));
    g.stroke();
    g.textAlign = "center";
    for (const [name, seconds, lost, tint] of marks) {
      const x = Math.min(Math.max(across(seconds, width), left + 20), width - 20);
      g.fillStyle = colour(tint);
      g.fillRect(x - 1, down(lost), 2, height - 18 - down(lost));
      g.fillText(`${name} ${length(seconds)}`, x, height - 4);
    }
  });
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = Math.round(((event.clientX - box.left - left) / (box.width - left)) * (points.length - 1));
    const [seconds, lost] = points[Math.min(Math.max(at, 0), points.length - 1)];
    showTip(event, `a save each ${length(seconds)} loses ${percent(lost)}`);
  });
  const facts = marks.map(([name, seconds, lost]) => [`${name === "best" ? "best interval" : "interval now"}, loses ${percent(lost)}`, length(seconds)]);
  facts.push(["between failures", length(advice.mtbf)], ["cost of a save", length(run.cost_seconds)], ["a save", length(run.save_seconds)]);
  const notes = advice.notes.map((note) => el("p", { class: "muted" }, note));
  part("Interval of saves", tiles(facts), canvas, el("p", { class: "muted" }, "Share of the time that is lost to saves and failures, by the interval from save to save."), ...notes);
}
