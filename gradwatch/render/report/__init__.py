"""Write the HTML report: one self-contained page with charts and findings."""
