// The page: the panels, each with a section of the data; a live page gets sections again when they change.

/** Figures at the top, and the state of the run. */
class Head {
  constructor() {
    this.name = document.getElementById("name");
    this.state = document.getElementById("state");
    this.figures = document.getElementById("figures");
    this.lost = "";
  }

  /** Show the section "run". */
  show(run) {
    this.run = run;
    const { pace } = run;
    const bubble = pace?.bubble ?? {};
    this.name.textContent = run.id;
    document.title = `${run.id} – stageline`;
    const figures = [
      ["steps", run.total === null ? short(run.steps) : `${short(run.steps)} of ${short(run.total)}`],
      ["steps/s, last minute", pace?.last_minute ? short(pace.last_minute) : null],
      ["steps/s, best", pace?.best ? short(pace.best) : null],
      ["time left", pace?.left ? duration(pace.left) : null],
      ["loss", run.loss === null ? null : short(run.loss, 5)],
      ["best evaluation", run.best ? `${run.best.metric} ${short(run.best.value, 4)}, step ${short(run.best.step)}` : null],
      ["bubble, measured", bubble.measured === null || bubble.measured === undefined ? null : share(bubble.measured)],
      ["bubble, planned", bubble.planned === null || bubble.planned === undefined ? null : share(bubble.planned)],
      ["checkpoint", run.checkpoint === null ? null : `step ${short(run.checkpoint)}`],
      ["workers replaced", run.restarts ? short(run.restarts) : null],
    ];
    fill(this.figures, ...figures.filter(([, value]) => value !== null).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    this.say();
  }

  /** Say how the run is, how old that is, and if the connection of a live page is lost. */
  say() {
    const { phase, reason, source, as_of: asOf } = this.run;
    const colour = phase === "finished" ? "good" : ["failed", "killed"].includes(phase) ? "bad" : "warn";
    const origin = source === "broker" ? "as its broker tells it" : "from its records";
    const text = [el("strong", { class: ["running", "waiting"].includes(phase) ? null : colour }, phase), reason ? `: ${reason}` : "", ` (${origin}, ${clock(asOf)})`];
    const lost = this.lost ? el("span", { class: "bad" }, ` ${this.lost}`) : null;
    const said = [...text.map((each) => (each instanceof Node ? each.textContent : each)), this.lost].join("");
    if (said !== this.said) fill(this.state, ...text, lost); // readers aloud are told of changes only
    this.said = said;
  }
}

/** Panel of what limits the run. */
class Why {
  constructor(root) {
    this.root = root;
  }

  /** Show the section "why". */
  show({ text, action, slow, recovery }) {
    fill(this.root, el("p", {}, text), action ? el("p", {}, el("strong", {}, "What to do: "), action) : null,
      ...(slow ? this.limits(slow) : []), recovery ? this.lost(recovery) : null);
  }

  /** @returns {HTMLElement} Time that was lost to losses, restarts and stalls. */
  lost({ text, setbacks, remedies }) {
    const saved = ({ seconds }) => (seconds === null ? "" : ` (that would have saved ${duration(seconds)})`);
    return el("div", { class: "finding" }, el("p", {}, el("span", { class: "cause" }, "Time lost: "), text),
      el("ul", {}, ...setbacks.map((each) => el("li", {}, each.text)), ...remedies.map((each) => el("li", {}, `${each.do}${saved(each)}`))));
  }

  limits(slow) {
    const [first, last] = slow.steps;
    const step = el("p", {}, `A step takes ${duration(slow.seconds)} (steps ${first} to ${last}).`);
    if (!slow.findings.length) return [step, el("p", {}, slow.text)];
    return [step, ...slow.findings.map((found) => el("div", { class: "finding" },
      el("p", {}, el("span", { class: "cause" }, `Limited by ${found.cause}: `), found.text),
      found.remedies.length ? el("ul", {}, ...found.remedies.map((remedy) => el("li", {}, `${remedy.do} (a step would take ${duration(remedy.seconds)}, ${share(remedy.gain)} less, by simulation)`))) : null))];
  }
}

/** Panel of queues and workers. */
class Stores {
  constructor(root) {
    this.trends = new Trends(root);
    this.workers = new Table("Workers", [
      ["worker", (row) => row.index, "number"], ["stages", (row) => row.stages], ["is", (row) => row.standing], ["process", (row) => row.process],
      ["idle", (row) => share(row.idle), "number"], ["memory", (row) => size(row.memory), "number"], ["kept messages", (row) => size(row.retained), "number"],
      ["actions", (row) => short(row.actions), "number"], ["now", (row) => row.now, "wrap"],
    ]);
    const number = (name) => (row) => short(row[name]);
    this.queues = new Table("Queues", [
      ["queue", (row) => row.queue], ["from", (row) => row.producer], ["to", (row) => row.consumer], ["put", number("put"), "number"],
      ["taken", number("taken"), "number"], ["ready", number("ready"), "number"], ["in flight", number("in_flight"), "number"],
      ["retained", number("retained"), "number"], ["size", (row) => size(row.bytes), "number"], ["in/s", number("put_pace"), "number"],
      ["out/s", number("taken_pace"), "number"], ["credit", (row) => (row.credit_used === null ? "–" : `${row.credit_used}/${row.credit_limit ?? "∞"}`), "number"],
      ["resent", number("resent"), "number"], ["oldest", (row) => duration(row.oldest), "number"],
    ], "No worker has told of its queues.");
    root.append(el("h3", {}, "Workers"), this.workers.node, el("h3", {}, "Queues"), this.queues.node);
  }

  /** Show the section "stores". */
  show({ workers, queues }) {
    this.workers.show(workers);
    this.queues.show(queues);
  }
}

/** Panel of faults and recoveries. */
class Faults {
  constructor(root) {
    this.said = el("p");
    this.table = new Table("Losses of workers", [
      ["time", (row) => clock(row.at)], ["worker", (row) => row.worker, "number"], ["why", (row) => row.why, "wrap"],
      ["back to step", (row) => short(row.step), "number"], ["works again after", (row) => (row.returned === null ? "–" : duration(row.returned - row.at)), "number"],
    ], "No worker was lost.");
    this.others = new Table("Other events", [["what", (row) => row[0], "wrap"], ["times", (row) => short(row[1]), "number"]], "");
    root.append(this.said, this.table.node, this.others.node);
  }

  /** Show the section "faults". */
  show({ losses, others, recovering }) {
    this.said.textContent = recovering.join(" ");
    this.said.hidden = recovering.length === 0;
    this.table.show(losses);
    this.others.show(others);
  }
}

/** Panel of the plan and the environment. */
class Plan {
  constructor(root) {
    const rows = (label, none) => new Table(label, [["key", (row) => row[0]], ["value", (row) => row[1], "wrap"]], none);
    this.plan = rows("Plan", "The plan is not in this place.");
    this.environment = rows("Environment");
    root.append(opened("Plan", this.plan.node), opened("Environment", this.environment.node));
  }

  /** Show the section "plan". */
  show({ plan, environment }) {
    this.plan.show(plan);
    this.environment.show(environment);
  }
}

/** Show the data of the page, and follow it if the page is live. */
function begin() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = (id) => document.getElementById(id);
  const head = new Head();
  const stores = new Stores(place("stores"));
  const curves = new Curves(place("pace"));
  const panels = {
    run: head, why: new Why(place("why")), timetable: new Timetable(place("timetable")), stores, faults: new Faults(place("faults")), plan: new Plan(place("plan")),
    curves: { show: (section) => { curves.show(section); stores.trends.show(section.workers, section.events); } },
  };
  const show = (sections) => Object.entries(sections).forEach(([name, section]) => panels[name]?.show(section));
  show(data.sections);
  place("made").textContent = data.made;
  if (data.live) follow(head, show);
}

/** Get sections by server-sent events. */
function follow(head, show) {
  const events = new EventSource("events");
  const lose = (text) => {
    head.lost = text;
    head.say();
  };
  events.onmessage = (event) => {
    head.lost = "";
    show(JSON.parse(event.data));
  };
  events.addEventListener("lost", (event) => lose(JSON.parse(event.data)));
  events.onerror = () => lose(events.readyState === EventSource.CLOSED ? "The dashboard has ended, or takes no more readers." : "The dashboard does not answer; trying again.");
}

begin();
