// One picture of the timetable: the visible part of the visible lanes, in the colours of the theme.

/** A picture; it reads the place and the zoom of a `Timetable`. */
class Drawing {
  constructor(table) {
    this.table = table;
    this.ctx = table.canvas.getContext("2d");
    this.colours = Object.fromEntries(
      ["--page", "--panel", "--text", "--soft", "--line", "--on-action", "--focus", OTHER_KIND[0], ...Object.values(KINDS).map(([colour]) => colour), ...Object.values(IDLE_COLOURS)].map((name) => [name, style(name)]),
    );
    this.scale = table.plain / (table.to - table.from);
    this.boxes = 0;
  }

  x(time) {
    return this.table.gutter + (time - this.table.from) * this.scale;
  }

  draw() {
    const { table, ctx, colours } = this;
    const ratio = devicePixelRatio || 1;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.fillStyle = colours["--page"];
    ctx.fillRect(0, 0, table.width, table.height);
    const { pitch } = table.rows;
    const first = Math.max(0, Math.floor(table.frame.scrollTop / pitch));
    const last = Math.min(table.lanes.workers.length, Math.ceil((table.frame.scrollTop + table.height - AXIS) / pitch));
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, AXIS, table.width, table.height - AXIS);
    ctx.clip();
    for (let worker = first; worker < last; worker += 1) this.worker(worker, AXIS + worker * pitch - table.frame.scrollTop);
    this.borders();
    ctx.restore();
    this.axis();
    table.canvas.dataset.boxes = String(this.boxes);
  }

  /** Draw both rows of a worker. */
  worker(worker, top) {
    const { table, ctx, colours } = this;
    const { planned, ran } = table.rows;
    const [upper, lower] = [top + 2, top + planned + 3];
    ctx.fillStyle = colours["--panel"];
    ctx.fillRect(table.gutter, lower, table.plain, ran);
    ctx.fillStyle = colours["--soft"];
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    const { index } = table.lanes.workers[worker];
    ctx.fillText(table.gutter < 60 ? `w${index}` : `worker ${index}`, 6, lower + ran / 2);
    ctx.save();
    ctx.beginPath();
    ctx.rect(table.gutter, top, table.plain, table.rows.pitch);
    ctx.clip();
    ctx.globalAlpha = 0.55;
    for (const lane of table.lanes.planned[worker]) this.lane(lane, upper, planned, (place) => this.colourOf(lane, place), null);
    ctx.globalAlpha = 0.8;
    const idle = table.lanes.idle[worker];
    this.lane(idle, lower + ran * 0.3, ran * 0.4, (place) => colours[IDLE_COLOURS[table.lanes.causes[idle.columns.cause[place]][0]]], null);
    ctx.globalAlpha = 1;
    const lane = table.lanes.ran[worker];
    this.lane(lane, lower, ran, (place) => this.colourOf(lane, place), (place) => table.lanes.nameOf(worker, lane.columns, place));
    if (table.chosen?.worker === worker) this.outline(table.chosen, upper, lower);
    ctx.restore();
  }

  colourOf(lane, place) {
    return this.colours[(KINDS[this.table.lanes.kinds[lane.columns.kind[place]]] ?? OTHER_KIND)[0]];
  }

  /** Draw the boxes of a row; of those that lie within one pixel, the first. */
  lane(lane, top, high, colourOf, nameOf) {
    const { table, ctx } = this;
    const fine = high >= 11 && nameOf;
    let drawn = -Infinity;
    for (let place = lane.after(table.from); place < lane.length && lane.start[place] < table.to; place += 1) {
      const [left, right] = [this.x(lane.start[place]), this.x(lane.end[place])];
      if (right - drawn < 0.6) continue;
      const colour = colourOf(place);
      if (!colour) continue;
      const wide = Math.max(0.8, right - left - (right - left > 4 ? 1 : 0));
      ctx.fillStyle = colour;
      ctx.fillRect(left, top, wide, high);
      drawn = left + wide;
      this.boxes += 1;
      if (fine && right - left > TEXT_WIDTH) this.name(nameOf(place), Math.max(left, table.gutter), Math.min(right, table.width), top + high / 2);
    }
  }

  name(text, left, right, middle) {
    const { ctx } = this;
    ctx.font = "11px system-ui, sans-serif";
    if (ctx.measureText(text).width > right - left - 3) return;
    ctx.fillStyle = this.colours["--on-action"];
    ctx.textAlign = "center";
    ctx.fillText(text, (left + right) / 2, middle + 0.5);
    ctx.textAlign = "left";
  }

  outline({ part, lane, place }, upper, lower) {
    const { ctx, table } = this;
    const [left, right] = [this.x(lane.start[place]), this.x(lane.end[place])];
    const [top, high] = part === "planned" ? [upper, table.rows.planned] : [lower, table.rows.ran];
    ctx.strokeStyle = this.colours["--text"];
    ctx.lineWidth = 2;
    ctx.strokeRect(left, top - 1, Math.max(2, right - left), high + 2);
  }

  /** Draw where steps begin. */
  borders() {
    const { ctx, table } = this;
    ctx.strokeStyle = this.colours["--line"];
    ctx.lineWidth = 1;
    for (const step of table.lanes.steps) {
      const x = Math.round(this.x(step.start)) + 0.5;
      if (x <= table.gutter || x > table.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, AXIS);
      ctx.lineTo(x, table.height);
      ctx.stroke();
    }
  }

  /** Draw the times above, from the beginning of the first step. */
  axis() {
    const { ctx, table, colours } = this;
    const wanted = Math.max(2, Math.floor(table.plain / 90));
    const rough = (table.to - table.from) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const apart = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    ctx.fillStyle = colours["--soft"];
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    ctx.textAlign = "center";
    ctx.strokeStyle = colours["--line"];
    for (let tick = Math.ceil(table.from / apart); tick * apart <= table.to; tick += 1) {
      const x = this.x(tick * apart);
      if (x > table.width - 24 || x < table.gutter + 12) continue;
      ctx.fillText(tick === 0 ? "0" : duration(tick * apart), x, AXIS / 2 - 2);
      ctx.fillRect(x, AXIS - 6, 1, 4);
    }
    ctx.textAlign = "left";
  }
}
