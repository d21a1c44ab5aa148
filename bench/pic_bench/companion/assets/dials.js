// A slider over the measured values of a setting: what is spliced, what is lost, and all values in one drawing.

const SVG = "http://www.w3.org/2000/svg";

class DialView {
  constructor(dial) {
    const box = byId(`dial-${dial.name}`);
    this.dial = dial;
    [this.list, this.slider, this.label] = ["select", "input[type=range]", "output"].map((name) => box.querySelector(name));
    [this.figures, this.plot, this.record] = [".figures", ".plot", ".record"].map((name) => box.querySelector(name));
    fill(this.list, dial.series, (series) => series.title);
    this.list.addEventListener("change", () => this.showSeries());
    this.slider.addEventListener("input", () => this.showStop());
    this.showSeries();
  }

  showSeries() {
    this.series = this.dial.series[this.list.value || 0];
    const { stops } = this.series;
    this.slider.max = stops.length - 1;
    this.slider.value = Math.max(0, stops.findIndex((stop) => stop.label.includes("default")));
    this.record.replaceChildren("Record: ", element("code", "", code(this.series.record)));
    this.showStop();
  }

  showStop() {
    const { stops, of, measure, unit } = this.series;
    const stop = stops[this.slider.value];
    const most = Math.max(...stops.map(({ loss }) => loss?.high ?? 0));
    this.label.textContent = stop.label;
    this.slider.setAttribute("aria-valuetext", stop.label);
    const rows = [this.figure("spliced", percent(stop.spliced, 1), stop.spliced, "moved", of)];
    if (stop.loss) rows.push(this.figure("loss", `${nats(stop.loss.value)} nats`, stop.loss.value / most, "loss", `${measure} (${nats(stop.loss.low)} to ${nats(stop.loss.high)})`));
    else rows.push(this.figure("loss", "not measured", 0, "loss", measure));
    if (stop.recovery) rows.push(this.figure("recovery", `${stop.recovery.value.toFixed(2)}`, stop.recovery.value, "prefix", `of the new answer (${stop.recovery.low.toFixed(2)} to ${stop.recovery.high.toFixed(2)})`));
    else if (stop.same_first) rows.push(this.figure("same first token", percent(stop.same_first.value, 1), stop.same_first.value, "prefix", "as a full prefill's"));
    rows.push(element("small", "muted", `${count(stop.n)} ${unit}`));
    this.figures.replaceChildren(...rows);
    this.draw(stop, most);
  }

  figure(name, value, part, kind, note) {
    const fillOf = element("i", kind);
    fillOf.style.width = length(part);
    return element("div", "figure", element("span", "", name), element("b", "", value), element("div", "meter", fillOf), element("small", "", note));
  }

  draw(chosen, most) {
    const stops = this.series.stops.filter(({ loss }) => loss);
    this.plot.replaceChildren();
    if (!stops.length) return;
    const [width, height, left, bottom] = [320, 150, 8, 22];
    const all = this.series.stops.map((stop) => Math.round(100 * stop.spliced));
    const [low, high] = [Math.floor(Math.min(...all) / 10) / 10, Math.ceil(Math.max(...all) / 10) / 10];
    const x = (stop) => left + ((stop.spliced - low) / (high - low)) * (width - 2 * left);
    const y = (value) => height - bottom - (most ? value / most : 0) * (height - bottom - 16);
    const svg = this.node("svg", { viewBox: `0 0 ${width} ${height}` });
    svg.append(this.node("line", { x1: left, x2: width - left, y1: y(0), y2: y(0) }), this.text(left, height - 6, `${percent(low, 1)} spliced`, "start"));
    svg.append(this.text(width - left, height - 6, percent(high, 1), "end"), this.text(left, 11, `loss, up to ${nats(most)}`, "start"));
    for (const stop of stops.filter((one) => one !== chosen).concat(stops.includes(chosen) ? chosen : [])) {
      const group = this.node("g", { class: stop === chosen ? "chosen" : "" });
      group.append(this.node("line", { class: "interval", x1: x(stop), x2: x(stop), y1: y(stop.loss.low), y2: y(stop.loss.high) }));
      group.append(this.node("circle", { cx: x(stop), cy: y(stop.loss.value), r: 4 }));
      svg.append(group);
    }
    this.plot.append(svg);
  }

  text(x, y, words, anchor) {
    const node = this.node("text", { x, y, "text-anchor": anchor });
    node.textContent = words;
    return node;
  }

  node(name, attributes) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }
}
