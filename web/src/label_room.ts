/** Places for texts in a plot, so that they cover neither each other nor what is drawn. */

export interface Box {
  left: number;
  top: number;
  right: number;
  bottom: number;
}

/** A text that could stand here: `boxes` are what it would cover. */
export interface Spot {
  boxes: Box[];
}

export class LabelRoom {
  private readonly taken: Box[] = [];

  constructor(private readonly within: Box) {}

  take(...boxes: Box[]): void {
    this.taken.push(...boxes);
  }

  /** The first spot with nothing in it, which is taken from then on. */
  first<S extends Spot>(spots: S[]): S | undefined {
    const found = spots.find((spot) => spot.boxes.every((box) => this.isFree(box)));
    if (found !== undefined) this.take(...found.boxes);
    return found;
  }

  private isFree(box: Box): boolean {
    const { within } = this;
    const inside =
      box.left >= within.left &&
      box.right <= within.right &&
      box.top >= within.top &&
      box.bottom <= within.bottom;
    return inside && !this.taken.some((one) => overlap(one, box));
  }
}

function overlap(a: Box, b: Box): boolean {
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}

/** Of a text with its baseline at `y`. */
export function textBox(x: number, y: number, width: number, size: number): Box {
  return { left: x, top: y - 0.8 * size, right: x + width, bottom: y + 0.25 * size };
}

/** Of a text that begins at a point and rises with a slope: small boxes along it. */
export function slantedBoxes(x: number, y: number, angle: number, width: number): Box[] {
  const pieces = Math.max(1, Math.ceil(width / 10));
  return Array.from({ length: pieces }, (_, i) => {
    const along = (i + 0.5) * (width / pieces);
    const middle = [x + along * Math.cos(angle), y + along * Math.sin(angle) - 4];
    return {
      left: middle[0] - 7,
      top: middle[1] - 7,
      right: middle[0] + 7,
      bottom: middle[1] + 7,
    };
  });
}
