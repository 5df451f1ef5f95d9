"""What was asked and what came out: study files, runs, plots, the command line."""
