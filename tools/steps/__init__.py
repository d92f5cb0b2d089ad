"""The step player: what one training step does on four ranks, recorded, and drawn by the reader."""
