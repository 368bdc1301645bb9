"""One page on a model: numbers first (`judging`, `findings`, `effects`, `words`), then how they look."""
