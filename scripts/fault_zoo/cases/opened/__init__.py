"""Scripts that judged an earlier version of gradwatch before they were opened."""
