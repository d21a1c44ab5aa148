// Draws one call as a bar on a canvas.

const NUM_RUN_COLOURS = 5;
const BAR_TOP = 7;
const BAR_HEIGHT = 14;
const BELOW_BAR = 6;

class Painter {
  constructor() {
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(
      ["ground", "ink", "muted", "prefix", "computed", "answer", "break", "field", "on-run", "on-prefix", "accent"].map((name) => [name, read(name)]),
    );
    this.runs = Array.from({ length: NUM_RUN_COLOURS }, (_, i) => read(`run-${i}`));
  }

  colourOf(span) {
    if (span.kind === PREFIX) return this.colours.prefix;
    if (span.kind === GAP) return span.isGuarded ? this.colours.field : this.colours.computed;
    return this.runs[span.donor.number % NUM_RUN_COLOURS];
  }

  // `marked` is a span of the call's path to be framed, `length` the tokens that the whole width stands for.
  paint(canvas, call, length, marked) {
    const width = canvas.clientWidth || 600;
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((BAR_TOP + BAR_HEIGHT + BELOW_BAR) * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const x = (token) => (token * width) / length;
    this.paintAnswer(context, x(call.promptLen), x(call.length));
    for (const span of call.spans) this.paintSpan(context, call, span, x);
    for (const field of call.changedFields) this.paintField(context, x(field.start), width);
    if (call.found && !isRewind(call.found)) this.paintBreak(context, x(call.found.at), width, call.lost > 0);
    if (marked) {
      const end = Math.min(x(marked.end), width);
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 2;
      context.strokeRect(x(marked.start) + 1, BAR_TOP - 1, Math.max(end - x(marked.start) - 2, 3), BAR_HEIGHT + 2);
    }
  }

  paintAnswer(context, left, right) {
    if (right - left < 2) return;
    context.fillStyle = this.colours.answer;
    context.strokeStyle = this.colours.computed;
    context.fillRect(left, BAR_TOP, right - left, BAR_HEIGHT);
    context.strokeRect(left + 0.5, BAR_TOP + 0.5, right - left - 1, BAR_HEIGHT - 1);
  }

  paintSpan(context, call, span, x) {
    const left = x(span.start);
    const exact = x(span.end) - left;
    // A pixel of ground separates neighbors of one colour; a span narrower than a pixel is drawn as one pixel.
    const wide = Math.max(exact > 4 ? exact - 1 : exact, 1);
    context.fillStyle = this.colourOf(span);
    context.fillRect(left, BAR_TOP, wide, BAR_HEIGHT);
    if (span.kind !== RUN) {
      if (span.kind === PREFIX) this.label(context, count(span.end), left, wide, this.colours["on-prefix"]);
      return;
    }
    if (span.donor.session !== call.session) this.hatch(context, left, wide);
    this.label(context, signed(span.shift), left, wide, this.colours["on-run"], this.colourOf(span));
    // The mark of a seam would hide a short run.
    if (span.seamLen && wide >= 6) {
      context.fillStyle = this.colours.ink;
      const seam = Math.max(x(span.seamLen), 1.5);
      context.fillRect(left - seam, BAR_TOP - 2, seam, BAR_HEIGHT + 4);
    }
  }

  label(context, text, left, wide, colour, ground) {
    if (wide < 30) return;
    context.font = "600 10.5px system-ui, sans-serif";
    const needed = context.measureText(text).width + 10;
    if (needed > wide) return;
    if (ground) {
      context.fillStyle = ground;
      context.fillRect(left + 2, BAR_TOP, needed - 4, BAR_HEIGHT);
    }
    context.fillStyle = colour;
    context.fillText(text, left + 5, BAR_TOP + 11);
  }

  paintBreak(context, at, width, isCostly) {
    const middle = Math.min(Math.max(at, 4), width - 4);
    context.fillStyle = isCostly ? this.colours.break : this.colours.muted;
    context.beginPath();
    context.moveTo(middle - 4.5, 0);
    context.lineTo(middle + 4.5, 0);
    context.lineTo(middle, BAR_TOP - 0.5);
    context.fill();
  }

  paintField(context, at, width) {
    const middle = Math.min(Math.max(at, 4), width - 4);
    const top = BAR_TOP + BAR_HEIGHT;
    context.fillStyle = this.colours.field;
    context.beginPath();
    context.moveTo(middle - 4, top + BELOW_BAR);
    context.lineTo(middle + 4, top + BELOW_BAR);
    context.lineTo(middle, top + 0.5);
    context.fill();
  }

  // Stripes over a run that another session computed.
  hatch(context, left, wide) {
    context.save();
    context.beginPath();
    context.rect(left, BAR_TOP, wide, BAR_HEIGHT);
    context.clip();
    context.beginPath();
    for (let x = left - (left % 6) - BAR_HEIGHT; x < left + wide; x += 6) {
      context.moveTo(x, BAR_TOP + BAR_HEIGHT);
      context.lineTo(x + BAR_HEIGHT, BAR_TOP);
    }
    Object.assign(context, { strokeStyle: this.colours.ground, globalAlpha: 0.55, lineWidth: 1.3 });
    context.stroke();
    context.restore();
  }
}
