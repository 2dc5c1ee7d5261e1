"""Workers on other hosts, started over ssh."""
