"""What both daemons do in the same way, between the engine below and their own apps above."""
