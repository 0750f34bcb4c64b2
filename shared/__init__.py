"""What both daemons and the command line are made of; `README.md` beside this has the map."""
