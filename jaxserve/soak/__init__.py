"""Soak: mixed, hostile traffic on a real server for as long as asked, with checks of what must hold all the while."""
