"""A headless chromium, where one is installed, and what tests ask of a page in it."""

import shutil
import time
from dataclasses import dataclass

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing outside this machine is reached
)
SECONDS = 20

DEEP = """
const found = [];
const walk = (node) => {
  for (const child of node.querySelectorAll("*")) {
    if (child.matches(arguments[0])) found.push(child);
    if (child.shadowRoot) walk(child.shadowRoot);
  }
};
walk(document);
return found;
"""


@dataclass
class Page:
    """A browser with a page in it."""

    driver: object

    def script(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def __getitem__(self, selector):
        """Return the one element that a selector names."""
        (found,) = self.driver.find_elements("css selector", selector)
        return found

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def deep(self, selector):
        """Return the elements that a selector names, those in shadow roots too."""
        return self.script(DEEP, selector)

    def wait(self, condition, message):
        """Wait until a function returns something true, and return that."""
        deadline = time.monotonic() + SECONDS
        while not (result := condition()):
            assert time.monotonic() < deadline, message
            time.sleep(0.05)
        return result

    def complaints(self):
        """Return what the page wrote to the console as an error since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def look(self, *, width=1280, theme="light"):
        """Change the width of the window and the theme of the system."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """Return a headless chromium, driven by chromedriver; both end with the tests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, service = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not service:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=service))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver):
    """Return the browser on an empty page, wide and light."""
    page = Page(driver)
    driver.get("about:blank")
    page.look()
    page.complaints()
    return page
