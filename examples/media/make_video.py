"""Draws counter.mp4: the numbers 1 to 8, each for half a second, 320 x 240.

python examples/media/make_video.py [FOLDER]
"""

import sys
from fractions import Fraction
from pathlib import Path

import av
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, FPS, SECONDS = 320, 240, 24, 4
PER_NUMBER = FPS // 2
SCALE = 3  # drawn this much larger, for smooth edges
COLORS = ((38, 70, 83), (42, 126, 118), (176, 122, 32), (188, 80, 54))
CREAM = (250, 246, 236)


def draw(index: int) -> Image.Image:
    """Frame ``index``: the number, and a ring that fills up while it is shown."""
    number, step = divmod(index, PER_NUMBER)
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), COLORS[number % len(COLORS)])
    pen = ImageDraw.Draw(image, "RGBA")
    x, y, radius = WIDTH * SCALE // 2, HEIGHT * SCALE // 2, 88 * SCALE
    ring = (x - radius, y - radius, x + radius, y + radius)
    pen.ellipse(ring, outline=(*CREAM, 60), width=10 * SCALE)
    pen.arc(ring, -90, -90 + 360 * (step + 1) / PER_NUMBER, fill=CREAM, width=10 * SCALE)
    pen.text(
        (x, y),
        str(number + 1),
        font=ImageFont.load_default(size=112 * SCALE),
        fill=CREAM,
        anchor="mm",
        stroke_width=SCALE,
    )
    return image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    # One thread, because the encoder's output depends on how many there are.
    options = {"crf": "22", "preset": "slow", "threads": "1"}
    with av.open(str(folder / "counter.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for index in range(FPS * SECONDS):
            frame = av.VideoFrame.from_image(draw(index))
            frame.pts, frame.time_base = index, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


if __name__ == "__main__":
    main()
