"""The reference engine: a real, tiny policy in numpy behind SGLang's HTTP contract, fast enough for tests and a demo."""
