// Lanes of a timetable: what each worker ran and waited for, as columns of numbers, found by time.

/** Colours of kinds of actions, and what they do. */
const KINDS = {
  F: ["--forward", "forward"], B: ["--backward", "backward"], I: ["--input", "gradient of the input"],
  W: ["--weight", "gradient of the weights"], U: ["--update", "update"],
};
const OTHER_KIND = ["--other", "other actions"];
const IDLE_COLOURS = { // of causes that are drawn; a worker that waits for another stage's computation is blank
  wire: "--wire", data: "--data", disk: "--disk", offload: "--offload", script: "--script", evaluation: "--evaluation", switching: "--switching", paused: "--paused",
  credit: "--credit", room: "--room", loop: "--loop",
};

/** @returns {Float64Array} Sums of the differences, times `unit`. */
function summed(differences, unit) {
  let sum = 0;
  return Float64Array.from(differences, (each) => (sum += each) * unit);
}

/** Boxes of one row in order of their starts; none lies within another. */
class Lane {
  /**
   * @param {Object} columns Columns `start` (differences) and `took`, in microseconds, and others of the same length.
   * @param {number} [shift] Seconds to add to all times.
   */
  constructor(columns, shift = 0) {
    this.columns = columns;
    this.start = summed(columns.start, 1e-6).map((each) => each + shift);
    this.end = this.start.map((each, place) => each + columns.took[place] * 1e-6);
    this.length = this.start.length;
  }

  /** @returns {number} Place of the first box that ends after `time`. */
  after(time) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** @returns {number} Place of the box at `time`, -1 without one. */
  at(time) {
    const place = this.after(time);
    return place < this.length && this.start[place] <= time ? place : -1;
  }
}

/** The section "timetable" of the page's data, decoded. Times are in seconds from the start of the first step. */
class Lanes {
  constructor({ workers, steps, kinds, causes, lanes, planned_of }) {
    this.workers = workers;
    this.steps = steps;
    this.kinds = kinds;
    this.causes = causes;
    this.ran = lanes.map((lane) => new Lane(lane.ran));
    this.idle = lanes.map((lane) => new Lane(lane.idle));
    this.planned = lanes.map((lane) => planned_of.map((place) => new Lane(lane.planned, steps[place].start)));
    this.end = Math.max(1e-6, ...this.ran.map((lane) => lane.end[lane.length - 1] ?? 0));
    this.begin = Math.min(0, ...this.ran.map((lane) => lane.start[0] ?? 0));
  }

  /** @returns {string} Short name of an action, such as "F3", with its stage if its worker has several. */
  nameOf(worker, columns, place) {
    const kind = this.kinds[columns.kind[place]];
    const microbatch = columns.microbatch[place] < 0 ? "" : columns.microbatch[place];
    const several = this.workers[worker].stages.length > 1;
    return `${several ? `${this.labelOf(worker, columns.stage[place])}:` : ""}${kind}${microbatch}`;
  }

  /** @returns {string} Label of a stage of a worker. */
  labelOf(worker, stage) {
    return this.workers[worker].labels[stage] ?? String(stage);
  }

  /** @returns {string} What a worker did at a place of a lane, in words. */
  describe(worker, part, lane, place) {
    const { columns } = lane;
    const times = `${duration(lane.end[place] - lane.start[place])}, from ${duration(lane.start[place])} to ${duration(lane.end[place])}`;
    if (part === "idle") {
      const [, text] = this.causes[columns.cause[place]];
      const stage = columns.stage[place];
      return `worker ${this.workers[worker].index} waits: ${text}${stage < 0 ? "" : ` (stage ${stage})`}, ${times}`;
    }
    const [, kind] = KINDS[this.kinds[columns.kind[place]]] ?? [null, this.kinds[columns.kind[place]]];
    const microbatch = columns.microbatch[place] < 0 ? "" : ` of microbatch ${columns.microbatch[place]}`;
    const step = part === "ran" ? `, step ${this.steps[columns.step[place]].step}` : ", as planned";
    return `worker ${this.workers[worker].index}, stage ${this.labelOf(worker, columns.stage[place])}: ${kind}${microbatch}${step}, ${times}`;
  }
}
