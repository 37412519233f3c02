"""What the HTML page is made of: `data` is what its charts draw, beside it its style and script."""
