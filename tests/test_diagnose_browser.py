"""The page as Chromium shows it, where there is one: every picture, pixel by pixel, and nothing fetched."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from models import make_model, tokens
from oscar_kv.diagnose import diagnose
from oscar_kv.diagnose.html import write

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
WIDTH, HEIGHT = 1120, 6000
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
    "--force-color-profile=srgb", f"--window-size={WIDTH},{HEIGHT}", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is installed")
def test_the_page_shows_all_pictures(tmp_path):
    torch.manual_seed(0)
    report = diagnose(make_model(initializer_range=0.1), {"input_ids": tokens(300)[0]})
    page = write(report, tmp_path / "report")
    pictures = sorted(page.parent.glob("*.png"))
    alone = tmp_path / "alone" / page.name  # away from the pictures beside it
    alone.parent.mkdir()
    page.rename(alone)
    shot = tmp_path / "shot.png"
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", alone.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    screen = np.asarray(Image.open(shot).convert("RGB"))
    assert screen.shape == (HEIGHT, WIDTH, 3)
    assert len(pictures) == 6
    for path in pictures:
        assert shows(screen, np.asarray(Image.open(path).convert("RGB"))), path.name


def shows(screen, picture):
    """Whether a picture is somewhere on the screen, in its own size."""
    height, width = picture.shape[:2]
    row = int(picture.reshape(height, -1).std(1).argmax())  # the row with most to tell
    for left in range(WIDTH - width + 1):
        lines = (screen[:, left : left + width] == picture[row]).all((1, 2)).nonzero()[0] - row
        if any((screen[top : top + height, left : left + width] == picture).all() for top in lines if top >= 0):
            return True
    return False
