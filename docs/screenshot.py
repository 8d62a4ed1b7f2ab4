"""Take docs/figures/report.png with Chromium and selenium: `python docs/screenshot.py DIR/report.html`."""

import base64
import sys
from pathlib import Path

from selenium import webdriver

SIZE = {"width": 1280, "height": 1310}  # down to the first curves
SCALE = 0.8


def main(page: str) -> None:
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options) as browser:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**SIZE, "deviceScaleFactor": SCALE, "mobile": False}
        )
        browser.get(Path(page).resolve().as_uri())
        screenshot = browser.execute_cdp_cmd("Page.captureScreenshot", {})
    (Path(__file__).parent / "figures" / "report.png").write_bytes(base64.b64decode(screenshot["data"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
