"""The glass box: what a run's folder and its model reveal. Reads run folders; never sits inside the trainer."""
