"""A hold: ranks that stay, with torch imported, and in which one script after the other starts at once."""
