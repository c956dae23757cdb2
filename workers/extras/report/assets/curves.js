// Plots over time, by uPlot: steps per second, loss, memory and retained messages, with the events of a run.

const SYNC = "run"; // plots with one time axis show one moment
const HEIGHT = 230; // pixels
const MOST_ROWS = 200; // of a table behind a plot
const APART = [ // seconds between two ticks of a time axis
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200,
  86400, 172800, 604800, 2592000,
];
const MOST_LINES = 8; // in a plot of the workers; a table has the others

/** Marks of events: colour, sign, and if a line is drawn over the whole height of a plot. */
const EVENTS = {
  loss: { colour: "--bad", says: "worker lost", whole: true, dash: [] },
  leave: { colour: "--warn", says: "worker left on notice", whole: true, dash: [] },
  return: { colour: "--good", says: "its place works again", whole: true, dash: [4, 4] },
  broker: { colour: "--warn", says: "broker started again", whole: true, dash: [2, 3] },
  resume: { colour: "--c0", says: "resumed", whole: true, dash: [2, 3] },
  pause: { colour: "--c2", says: "paused", whole: true, dash: [6, 3] },
  "pause-end": { colour: "--c2", says: "end of the pause", whole: true, dash: [2, 3] },
  checkpoint: { colour: "--c4", says: "checkpoint", whole: false, dash: [] },
  evaluation: { colour: "--c3", says: "evaluation", whole: false, dash: [] },
};

/** A plot of lines over time. It is redrawn in the colours of a theme when that changes. */
class Plot {
  /**
   * @param {string} title Heading.
   * @param {function(number): string} write Writes a value.
   */
  constructor(title, write) {
    this.write = write;
    this.events = [];
    this.signature = "";
    this.place = el("div");
    this.node = el("div", { class: "plot" }, el("h3", {}, title), this.place);
    this.none = el("p", { class: "soft" }, "Nothing is recorded.");
    this.node.append(this.none);
    new ResizeObserver(() => this.resize()).observe(this.node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot?.redraw(false));
  }

  /**
   * Show lines.
   * @param {Array<{label: string, colour: string, points?: boolean}>} lines The lines.
   * @param {Array<Array<number|null>>} columns Times, then a column of values for each line.
   * @param {Array<{at: number, what: string}>} events Events of the run.
   */
  show(lines, columns, events) {
    this.events = events;
    const empty = columns.length < 2 || columns[0].length === 0;
    this.none.hidden = !empty;
    this.place.hidden = empty;
    if (empty) return;
    const single = columns[0].length === 1; // drawn as a point in the middle
    if (single) columns = columns.map(([value], place) => (place ? [null, value, null] : [value - 1, value, value + 1]));
    const signature = JSON.stringify([lines, single]);
    if (signature !== this.signature) {
      this.signature = signature;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(lines, single), columns, this.place);
    } else {
      this.plot.setData(columns);
    }
  }

  /** @returns {Object} Options of uPlot for these lines. */
  options(lines, single) {
    const axis = { stroke: () => style("--soft"), grid: { stroke: () => style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const series = lines.map(({ label, colour, points }) => ({
      label,
      stroke: () => style(colour),
      width: points ? 0 : 1.6,
      paths: points ? () => null : undefined,
      points: points || single ? { show: true, size: 7, fill: () => style(colour) } : { show: false },
      value: (_, value) => (value === null || value === undefined ? "–" : this.write(value)),
      spanGaps: Boolean(points),
    }));
    return {
      width: this.width(),
      height: HEIGHT,
      cursor: { sync: { key: SYNC }, drag: { x: true, y: false } },
      scales: { x: { time: true, range: (_, low, high) => (high > low ? [low, high] : [low - 1, high + 1]) } },
      axes: [{ ...axis, space: 84, incrs: APART, values: (_, ticks, at, space, apart) => ticks.map((each) => tickOf(each, apart)) }, { ...axis, size: 64, values: (_, ticks) => ticks.map((each) => this.write(each)) }],
      series: [{ label: "time", value: (_, at) => clock(at) }, ...series],
      hooks: { draw: [(plot) => this.drawEvents(plot)] },
    };
  }

  /** Draw the events over the plot. */
  drawEvents(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const event of this.events) {
      const mark = EVENTS[event.what];
      const x = Math.round(plot.valToPos(event.at, "x", true));
      if (!mark || x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = style(mark.colour);
      ctx.lineWidth = devicePixelRatio * (mark.whole ? 1.2 : 2);
      ctx.setLineDash(mark.dash);
      ctx.beginPath();
      ctx.moveTo(x, mark.whole ? bbox.top : bbox.top + bbox.height - 9 * devicePixelRatio);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  width() {
    return Math.max(200, Math.floor(this.node.clientWidth));
  }

  resize() {
    if (this.plot && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: HEIGHT });
  }
}

/** @returns {string} A time on an axis whose ticks are so many seconds apart. */
function tickOf(seconds, apart) {
  const milliseconds = Math.round(seconds * 1000);
  const text = clock(Math.floor(milliseconds / 1000));
  if (apart >= 86400) return text.slice(0, 10);
  if (apart >= 3600) return text.slice(5, 16);
  if (apart >= 60) return text.slice(11, 16);
  return apart >= 1 ? text.slice(11) : `${text.slice(14)}.${String(milliseconds % 1000).padStart(3, "0")}`;
}

/** @returns {HTMLElement} A list of what signs and colours mean. */
function keysOf(entries) {
  return el("ul", { class: "keys" }, ...entries.map(([colour, text]) => {
    const mark = el("span");
    mark.style.background = `var(${colour})`;
    return el("li", {}, mark, text);
  }));
}

/** @returns {Array} At most `MOST_ROWS` of these, at even distances, the last one included. */
function spread(all) {
  if (all.length <= MOST_ROWS) return all;
  const apart = (all.length - 1) / (MOST_ROWS - 1);
  return Array.from({ length: MOST_ROWS }, (_, place) => all[Math.round(place * apart)]);
}

/**
 * Join points of several lines over one column of times.
 * @param {Array<{at: number[], values: Array}>} lines Lines, with times in order.
 * @returns {Array<Array>} Times, then a column for each line; undefined where it has no point, null where that has no value.
 */
function joined(lines) {
  const times = [...new Set(lines.flatMap((line) => line.at))].sort((a, b) => a - b);
  const places = new Map(times.map((at, place) => [at, place]));
  return [times, ...lines.map((line) => {
    const column = new Array(times.length).fill(undefined);
    line.at.forEach((at, place) => { column[places.get(at)] = line.values[place]; });
    return column;
  })];
}

/** Panel of the pace and the loss. */
class Curves {
  constructor(root) {
    this.pace = new Plot("Steps per second", (value) => short(value));
    this.loss = new Plot("Loss", (value) => short(value, 4));
    this.keys = el("div");
    this.rates = new Table("Steps per second by time", [
      ["time", (row) => clock(row.at)], ["step", (row) => short(row.step), "number"], ["steps/s", (row) => short(row.value), "number"],
    ]);
    this.losses = new Table("Losses by step", [
      ["time", (row) => clock(row.at)], ["step", (row) => short(row.step), "number"], ["loss", (row) => short(row.value, 6), "number"],
    ]);
    this.evaluations = new Table("Evaluations", [
      ["after steps", (row) => short(row.step), "number"], ["time", (row) => clock(row.at)], ["loss", (row) => short(row.loss, 6), "number"],
      ["metrics", (row) => Object.entries(row.metrics).map(([name, value]) => `${name} ${short(value, 4)}`).join(", ")],
    ], "No evaluation.");
    this.events = new Table("Events", [["time", (row) => clock(row.at)], ["event", (row) => row.text, "wrap"]], "No events.");
    root.append(
      el("div", { class: "plots" }, this.pace.node, this.loss.node), this.keys,
      opened("Table of steps per second", this.rates.node), opened("Table of losses", this.losses.node),
      opened("Evaluations", this.evaluations.node), opened("Events", this.events.node),
    );
  }

  /** Show the section "curves". */
  show({ rates, losses, evaluations, events }) {
    const rounds = evaluations.filter((each) => typeof each.loss === "number" && each.at !== null);
    this.pace.show([{ label: "steps/s", colour: "--c0" }], [rates.at, rates.value], events);
    const lines = [{ label: "loss", colour: "--c0" }];
    const points = [{ at: losses.at, values: losses.value }];
    if (rounds.length) {
      lines.push({ label: "evaluated", colour: "--c3", points: true });
      points.push({ at: rounds.map((each) => each.at), values: rounds.map((each) => each.loss) });
    }
    this.loss.show(lines, joined(points), events);
    this.rates.show(rowsOf(rates));
    this.losses.show(rowsOf(losses));
    this.evaluations.show(evaluations);
    this.events.show(events);
    const there = new Set(events.map((each) => each.what));
    fill(this.keys, keysOf(Object.entries(EVENTS).filter(([what]) => there.has(what)).map(([, mark]) => [mark.colour, mark.says])));
  }
}

/** @returns {Array<{at: number, step: number, value: number}>} The rows of a table of a line's points. */
function rowsOf({ at, step, value }) {
  return spread(at.map((time, place) => ({ at: time, step: step[place], value: value[place] })));
}

/** Plots of memory and of retained messages, by worker. */
class Trends {
  constructor(root) {
    this.memory = new Plot("Memory of the workers", size);
    this.retained = new Plot("Messages kept in queues", size);
    this.said = el("p", { class: "soft" });
    this.node = el("div", {}, el("div", { class: "plots" }, this.memory.node, this.retained.node), this.said);
    root.append(this.node);
  }

  /** Show the samples of the section "curves". */
  show({ at, memory, retained }, events) {
    this.draw(this.memory, at, memory, events);
    this.draw(this.retained, at, retained, events);
    this.said.textContent = memory.length > MOST_LINES ? `The plots have the ${MOST_LINES} workers that took most; the table below has all ${memory.length}.` : "";
    this.said.hidden = !this.said.textContent;
  }

  draw(plot, at, columns, events) {
    const most = columns.map((column) => Math.max(-1, ...column.filter((each) => each !== null)));
    const drawn = columns.map((_, worker) => worker).filter((worker) => most[worker] >= 0).sort((a, b) => most[b] - most[a]).slice(0, MOST_LINES).sort((a, b) => a - b);
    plot.show(drawn.map((worker, place) => ({ label: `worker ${worker}`, colour: `--c${place}` })), [at, ...drawn.map((worker) => columns[worker])], drawn.length ? events : []);
  }
}
