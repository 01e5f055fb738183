"""The page in a real browser, where there is one: nothing broken, nothing loaded from elsewhere."""

import pytest
import torch

from models import make_model, tokens
from oscar_kv.diagnose import diagnose
from oscar_kv.diagnose.html import write

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


def test_the_page_shows_all_pictures(tmp_path):
    torch.manual_seed(0)
    report = diagnose(make_model(initializer_range=0.1), {"input_ids": tokens(300)[0]})
    page_path = write(report, tmp_path)
    with playwright.sync_playwright() as p:
        try:
            browser = p.chromium.launch()
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        page = browser.new_page()
        errors, requests = [], []
        page.on("pageerror", errors.append)
        page.on("request", lambda request: requests.append(request.url.split(":")[0]))
        page.goto(page_path.as_uri())
        widths = page.evaluate("Array.from(document.images, image => image.naturalWidth)")
        browser.close()
    assert len(widths) == 6
    assert min(widths) >= 900
    assert errors == []
    assert set(requests) <= {"file", "data"}
