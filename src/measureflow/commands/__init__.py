"""From a file to a model, predictions, a leaderboard and a report: what the command line does with tables."""
