// From drawings and pictures to the images of a network, by averages over areas.

// The share of each pixel of a line in the area from `start` to `stop`.
function coverage(start, stop, size) {
  const shares = [];
  for (let i = Math.max(0, Math.floor(start)); i < Math.min(size, Math.ceil(stop)); i++) {
    shares.push([i, (Math.min(stop, i + 1) - Math.max(start, i)) / (stop - start)]);
  }
  return shares;
}

// Average a map of `side` × `side` numbers over a grid: `left`, `top` is its corner and `step` its width.
function averaged(map, side, [height, width], left, top, step) {
  const result = new Float64Array(height * width);
  for (let i = 0; i < height; i++) {
    const rows = coverage(top + i * step[1], top + (i + 1) * step[1], side);
    for (let j = 0; j < width; j++) {
      const columns = coverage(left + j * step[0], left + (j + 1) * step[0], side);
      let sum = 0;
      for (const [y, a] of rows) for (const [x, b] of columns) sum += a * b * map[y * side + x];
      result[i * width + j] = sum;
    }
  }
  return result;
}

const between = (value, least, most) => Math.min(most, Math.max(least, value));

// Enlarge an image of `side` × `side` numbers to the drawing area, with edges as sharp as those of a pen, and no blocks.
function enlarged(image, side) {
  const pixel = (y, x) => image[between(y, 0, side - 1) * side + between(x, 0, side - 1)];
  const place = (i) => ((i + 0.5) * side) / SIDE - 0.5;
  return Float32Array.from({ length: SIDE * SIDE }, (_, i) => {
    const y = place(Math.floor(i / SIDE)), x = place(i % SIDE), top = Math.floor(y), left = Math.floor(x);
    const mix = (row) => (left + 1 - x) * pixel(row, left) + (x - left) * pixel(row, left + 1);
    return between(2 * ((top + 1 - y) * mix(top) + (y - top) * mix(top + 1)) - 0.4, 0, 1);
  });
}

// The box of the ink, and its centre of mass.
function extent(ink) {
  let [left, top, right, bottom, total, sumX, sumY] = [SIDE, SIDE, 0, 0, 0, 0, 0];
  ink.forEach((value, i) => {
    if (value < 0.1) return;
    const x = i % SIDE, y = Math.floor(i / SIDE);
    [left, right] = [Math.min(left, x), Math.max(right, x + 1)];
    [top, bottom] = [Math.min(top, y), Math.max(bottom, y + 1)];
    total += value;
    sumX += value * (x + 0.5);
    sumY += value * (y + 0.5);
  });
  return total ? { left, top, right, bottom, mass: [sumX / total, sumY / total] } : null;
}

// Return ink as an image (H, W): cut out, centred and scaled as the data set of a network has it.
function fitted(ink, fit, sizes) {
  const box = extent(ink), [height, width] = sizes;
  if (!box) return new Float64Array(height * width);
  if (!fit) return averaged(ink, SIDE, sizes, 0, 0, [SIDE / width, SIDE / height]);
  const [share, middle] = fit, inner = share * Math.min(height, width);
  const longest = Math.max(box.right - box.left, box.bottom - box.top, SIDE / 5);
  const step = longest / inner;
  const [x, y] = middle === "mass" ? box.mass : [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  return averaged(ink, SIDE, sizes, x - (step * width) / 2, y - (step * height) / 2, [step, step]);
}

// Read a picture file as three maps of SIDE × SIDE numbers from 0 to 1, its middle square.
async function readPicture(file) {
  const picture = await createImageBitmap(file);
  const canvas = make("canvas", { width: SIDE, height: SIDE }), context = canvas.getContext("2d");
  const side = Math.min(picture.width, picture.height);
  context.fillStyle = "#fff"; // behind transparent pixels
  context.fillRect(0, 0, SIDE, SIDE);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, (picture.width - side) / 2, (picture.height - side) / 2, side, side, 0, 0, SIDE, SIDE);
  const { data: bytes } = context.getImageData(0, 0, SIDE, SIDE);
  return [0, 1, 2].map((c) => Float32Array.from({ length: SIDE * SIDE }, (_, i) => bytes[4 * i + c] / 255));
}

// Return the ink of a picture: how far each pixel is from the colour at the edge, which is paper.
function inkOf([red, green, blue]) {
  const grey = red.map((value, i) => 0.299 * value + 0.587 * green[i] + 0.114 * blue[i]);
  const edge = [...grey].filter((_, i) => i < SIDE || i >= SIDE * (SIDE - 1) || i % SIDE === 0 || i % SIDE === SIDE - 1);
  const paper = edge.sort((a, b) => a - b)[edge.length >> 1];
  const far = grey.map((value) => Math.abs(value - paper));
  const most = far.reduce((a, b) => Math.max(a, b), 0);
  return most < 0.05 ? far.fill(0) : far.map((value) => (value / most < 0.25 ? 0 : value / most));
}
