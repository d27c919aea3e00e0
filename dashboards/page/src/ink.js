/** Axes and their figures are grey; curves and areas are not. */
const COLOURFUL = 40;

/** Whether a panel's drawing shows something: colour on a canvas, a cell, or words where there is no canvas. */
export function inked(panel) {
  const canvases = [...panel.querySelectorAll('canvas')];
  if (canvases.length) {
    return canvases.some(coloured);
  }
  const content = panel.querySelector('section > div:last-of-type') ?? panel;
  return content.querySelector('rect') !== null || content.textContent.trim() !== '';
}

function coloured(canvas) {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) {
    const pixel = data.subarray(at, at + 3);
    if (data[at + 3] && Math.max(...pixel) - Math.min(...pixel) > COLOURFUL) {
      return true;
    }
  }
  return false;
}
