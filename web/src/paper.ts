/** Printing: what was folded, hidden or on a canvas is shown for as long as it takes. */

type Step = () => void;

const before: Step[] = [];
const after: Step[] = [];

/** `prepare` runs before the page is printed, `restore` afterwards. In the order they come. */
export function onPaper(prepare: Step, restore: Step): void {
  before.push(prepare);
  after.push(restore);
}

export function listenToPrinting(): void {
  addEventListener("beforeprint", () => {
    // A view that is made now may have something to prepare itself.
    for (let i = 0; i < before.length; i++) before[i]();
  });
  addEventListener("afterprint", () => after.forEach((step) => step()));
}
