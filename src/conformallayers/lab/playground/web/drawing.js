// The drawing area: ink is an array of numbers from 0 to 1, so that no canvas has to be read back.

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const SIDE = 160; // of the drawing area, in pixels
const PEN = 12; // radius: strokes of the digits are about a sixth as wide as the digit is high
const STEP = 6; // of an arrow key

class Drawing {
  // `changed` is called after every change by the user.
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.context = canvas.getContext("2d");
    this.ink = new Float32Array(SIDE * SIDE);
    this.pen = [SIDE / 2, SIDE / 2];
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => { this.pressed = false; });
    }
    canvas.addEventListener("keydown", (event) => this.press(event));
    for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => this.show());
    this.show();
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
  }

  begin(event) {
    if (event.button) return;
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
    this.pressed = true;
    this.pen = this.place(event);
    this.line(this.pen);
  }

  move(event) {
    if (!this.pressed) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const one of events.length ? events : [event]) this.line(this.place(one));
  }

  press(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Delete" || event.key === "Backspace") {
      this.clear();
    } else if (event.key in moves) {
      const target = this.pen.map((at, axis) =>
        Math.min(SIDE - PEN, Math.max(PEN, at + moves[event.key][axis] * STEP)));
      if (event.shiftKey) {
        this.pen = target;
        this.show();
      } else {
        this.line(target);
      }
    } else {
      return;
    }
    event.preventDefault();
  }

  // Draw a line from the pen to a place, with soft edges.
  line(target) {
    const [[x0, y0], [x1, y1]] = [this.pen, target];
    const length = Math.hypot(x1 - x0, y1 - y0), reach = PEN + 1;
    const low = (a, b) => Math.max(0, Math.floor(Math.min(a, b) - reach));
    const high = (a, b) => Math.min(SIDE - 1, Math.ceil(Math.max(a, b) + reach));
    for (let y = low(y0, y1); y <= high(y0, y1); y++) {
      for (let x = low(x0, x1); x <= high(x0, x1); x++) {
        const along = length ? ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / length ** 2 : 0;
        const at = Math.min(1, Math.max(0, along));
        const distance = Math.hypot(x - x0 - at * (x1 - x0), y - y0 - at * (y1 - y0));
        const ink = Math.min(1, Math.max(0, PEN + 0.5 - distance));
        this.ink[y * SIDE + x] = Math.max(this.ink[y * SIDE + x], ink);
      }
    }
    this.pen = target;
    this.show();
    this.changed();
  }

  clear() {
    this.set(new Float32Array(SIDE * SIDE));
    this.changed();
  }

  set(ink) {
    this.ink = ink;
    this.show();
  }

  show() {
    const image = this.context.createImageData(SIDE, SIDE);
    this.ink.forEach((ink, i) => image.data.set([16 + 225 * ink, 17 + 225 * ink, 19 + 225 * ink, 255], 4 * i));
    this.context.putImageData(image, 0, 0);
    if (document.activeElement === this.canvas) {
      this.context.strokeStyle = "#7db4f5";
      this.context.beginPath();
      this.context.arc(...this.pen, PEN, 0, 2 * Math.PI);
      this.context.stroke();
    }
  }
}

// Paint numbers from 0 to 1, (C, H, W), as pixels on a canvas of that size.
function paintPixels(canvas, values, [channels, height, width]) {
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  const size = height * width;
  for (let i = 0; i < size; i++) {
    const [r, g, b] = [0, 1, 2].map((c) => 255 * values[(channels === 3 ? c : 0) * size + i]);
    image.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}
