// The timetable on a canvas: planned above measured for each worker. Only what is visible is drawn.

const AXIS = 26; // pixels for the times above the lanes
const LEAST_SPAN = 2e-6; // seconds that are shown at least
const TEXT_WIDTH = 22; // pixels that a box needs for its name

/** Panel of the timetable. Its keys: arrows choose an action or a worker, + and - zoom, 0 shows all. */
class Timetable {
  constructor(root) {
    this.canvas = el("canvas", {
      tabindex: "0", role: "application", "aria-label": "Timetable of steps, planned above measured",
      "aria-describedby": "timetable-keys",
    });
    this.space = el("div");
    this.frame = el("div", { class: "lanes" }, this.canvas, this.space);
    this.readout = el("output", { class: "readout" });
    this.steps = el("select", { "aria-label": "Step to show" });
    this.keys = el("div");
    this.none = el("p", { class: "soft" }, "No times of a whole step are known yet.");
    this.waits = new Table("Computing and waiting by worker", [
      ["worker", (row) => row.worker, "number"], ["stages", (row) => row.stages], ["computes", (row) => duration(row.computed), "number"],
      ["share of the step", (row) => share(row.share), "number"],
      ["waits", (row) => row.waits.map(([cause, seconds]) => `${cause} ${duration(seconds)}`).join("; "), "wrap"],
    ]);
    this.title = el("p");
    const help = "Drag to move, Ctrl and the wheel to zoom. Keys on the timetable: left and right choose an action, up and down a worker, + and - zoom, 0 shows all.";
    this.node = el("div", {}, this.title,
      el("div", { class: "tools" }, button("−", "Zoom out", () => this.zoom(1.6)), button("+", "Zoom in", () => this.zoom(1 / 1.6)),
        button("◀", "Earlier", () => this.move(-0.5)), button("▶", "Later", () => this.move(0.5)), button("All", "Show all steps", () => this.all()), this.steps),
      this.readout, this.frame, this.keys, el("p", { class: "soft", id: "timetable-keys" }, help));
    root.append(this.none, this.node, opened("Table of waits in the newest step", this.waits.node));
    this.steps.addEventListener("change", () => this.showStep(Number(this.steps.value)));
    this.lanes = null;
    this.chosen = null;
    this.following = true; // shows all of what comes, until the reader zooms
    this.listen();
  }

  /** Show the section "timetable". */
  show(section) {
    const there = section.steps.length > 0;
    this.none.hidden = there;
    this.node.hidden = !there;
    this.waits.show(section.summary);
    if (!there) return;
    this.lanes = new Lanes(section);
    this.chosen = null;
    const newest = section.steps[section.steps.length - 1];
    const planned = section.planned_seconds ? `; the plan, with the measured times of actions, takes ${duration(section.planned_seconds)}` : "";
    this.title.textContent = `Step ${newest.step} took ${duration(newest.end - newest.start)} by ${newest.schedule}${planned}.`;
    fill(this.steps, ...section.steps.map((each, place) => el("option", { value: place }, `step ${each.step}`)));
    this.steps.hidden = section.steps.length < 2;
    this.steps.value = String(section.steps.length - 1);
    this.showKeys();
    if (this.following) this.all();
    else this.resize();
  }

  showKeys() {
    const kinds = this.lanes.kinds.map((kind) => KINDS[kind] ?? OTHER_KIND);
    const idle = this.lanes.causes.filter(([cause]) => IDLE_COLOURS[cause]).map(([cause, text]) => [IDLE_COLOURS[cause], `waits: ${text}`]);
    const entries = new Map([...kinds, ...idle].map(([colour, text]) => [colour, text]));
    fill(this.keys, keysOf([...entries]));
  }

  listen() {
    new ResizeObserver(() => this.resize()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.frame.addEventListener("scroll", () => this.redraw());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.pointers = { ...this.pointers, [event.pointerId]: event.offsetX };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    for (const name of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(name, (event) => { delete this.pointers?.[event.pointerId]; });
    }
  }

  /** Height of a worker's two rows, and of each, in pixels. */
  get rows() {
    const count = this.lanes.workers.length;
    return count <= 16 ? { pitch: 36, planned: 9, ran: 19 } : count <= 32 ? { pitch: 26, planned: 6, ran: 14 } : { pitch: 20, planned: 4, ran: 11 };
  }

  get gutter() {
    return this.width < 520 ? 34 : 92;
  }

  get plain() {
    return this.width - this.gutter;
  }

  resize() {
    if (!this.lanes) return;
    const full = AXIS + this.lanes.workers.length * this.rows.pitch + 6;
    this.width = Math.max(120, this.frame.clientWidth);
    this.height = Math.min(full, Math.max(160, Math.floor(Math.min(innerHeight * 0.7, 700))));
    this.space.style.height = `${full - this.height}px`;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.redraw();
  }

  redraw() {
    if (this.waiting || !this.lanes) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.draw();
    });
  }

  /** Show these seconds, within what there is. */
  look(from, to) {
    const { begin, end } = this.lanes;
    const span = Math.min(end - begin, Math.max(LEAST_SPAN, to - from));
    this.from = Math.min(Math.max(from, begin), end - span);
    this.to = this.from + span;
    this.resize();
  }

  all() {
    this.following = true;
    this.look(this.lanes.begin, this.lanes.end);
  }

  showStep(place) {
    const step = this.lanes.steps[place];
    this.following = false;
    this.look(step.start, step.end);
  }

  /** Show `factor` times as long a time; the moment at the part `around` of the width stays. */
  zoom(factor, around = 0.5) {
    const span = this.to - this.from;
    const fixed = this.from + span * around;
    this.following = false;
    this.look(fixed - span * factor * around, fixed + span * factor * (1 - around));
  }

  /** Move by a part of the width. */
  move(part) {
    const span = this.to - this.from;
    this.following = false;
    this.look(this.from + span * part, this.to + span * part);
  }

  wheel(event) {
    const across = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), Math.max(0, event.offsetX - this.gutter) / this.plain);
    else if (across) this.move((event.deltaX || event.deltaY) / this.plain);
    else return;
    event.preventDefault();
  }

  pointed(event) {
    const held = Object.keys(this.pointers ?? {}).length;
    if (held === 0) {
      this.choose(this.found(event.offsetX, event.offsetY));
      return;
    }
    const others = Object.entries(this.pointers).filter(([id]) => Number(id) !== event.pointerId).map(([, x]) => x);
    const before = this.pointers[event.pointerId];
    this.pointers[event.pointerId] = event.offsetX;
    if (held === 1) this.move((before - event.offsetX) / this.plain);
    else this.zoom(Math.abs(before - others[0]) / Math.max(1, Math.abs(event.offsetX - others[0])), Math.max(0, others[0] - this.gutter) / this.plain);
  }

  /** @returns {Object|null} What lies at a place of the canvas. */
  found(x, y) {
    const { pitch, planned } = this.rows;
    const worker = Math.floor((y - AXIS + this.frame.scrollTop) / pitch);
    if (!this.lanes || x < this.gutter || y < AXIS || worker < 0 || worker >= this.lanes.workers.length) return null;
    const time = this.from + ((x - this.gutter) / this.plain) * (this.to - this.from);
    const lower = (y - AXIS + this.frame.scrollTop) % pitch > planned + 2;
    const parts = lower ? [["ran", this.lanes.ran[worker]], ["idle", this.lanes.idle[worker]]] : this.lanes.planned[worker].map((lane) => ["planned", lane]);
    const hit = parts.map(([part, lane]) => ({ worker, part, lane, place: lane.at(time) })).find(({ place }) => place >= 0);
    return hit ?? null;
  }

  choose(found) {
    this.chosen = found;
    this.readout.textContent = found ? this.lanes.describe(found.worker, found.part, found.lane, found.place) : "";
    this.redraw();
  }

  key(event) {
    const acts = {
      "+": () => this.zoom(1 / 1.6), "=": () => this.zoom(1 / 1.6), "-": () => this.zoom(1.6), 0: () => this.all(),
      ArrowLeft: () => (event.shiftKey ? this.move(-0.25) : this.step(-1)), ArrowRight: () => (event.shiftKey ? this.move(0.25) : this.step(1)),
      ArrowUp: () => this.other(-1), ArrowDown: () => this.other(1), Home: () => this.step(-Infinity), End: () => this.step(Infinity),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey || !this.lanes) return;
    event.preventDefault();
    acts[event.key]();
  }

  /** Choose the action that is so many places on, of the same worker. */
  step(by) {
    const worker = this.chosen?.worker ?? 0;
    const lane = this.lanes.ran[worker];
    const now = this.chosen?.part === "ran" ? this.chosen.place + by : lane.after(this.chosen ? this.chosen.lane.start[this.chosen.place] : this.from);
    this.reach({ worker, part: "ran", lane, place: Math.max(0, Math.min(lane.length - 1, now)) });
  }

  /** Choose the action of another worker at the same time. */
  other(by) {
    const worker = Math.max(0, Math.min(this.lanes.workers.length - 1, (this.chosen?.worker ?? -by) + by));
    const time = this.chosen ? this.chosen.lane.start[this.chosen.place] : this.from;
    const lane = this.lanes.ran[worker];
    this.reach({ worker, part: "ran", lane, place: Math.min(lane.length - 1, lane.after(time)) });
  }

  /** Choose this, and bring it into view. */
  reach(found) {
    if (found.lane.length === 0) return;
    const { pitch } = this.rows;
    const [start, end] = [found.lane.start[found.place], found.lane.end[found.place]];
    if (start < this.from || end > this.to) this.look((start + end - this.to + this.from) / 2, (start + end + this.to - this.from) / 2);
    const top = found.worker * pitch;
    if (top < this.frame.scrollTop) this.frame.scrollTop = top;
    if (top + pitch > this.frame.scrollTop + this.height - AXIS) this.frame.scrollTop = top + pitch - this.height + AXIS;
    this.choose(found);
  }

  draw() {
    new Drawing(this).draw();
  }
}

/** @returns {HTMLElement} A button. */
function button(text, label, act) {
  const made = el("button", { type: "button", "aria-label": label, title: label }, text);
  made.addEventListener("click", act);
  return made;
}
