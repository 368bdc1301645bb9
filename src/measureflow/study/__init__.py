"""The paper's figures and claims, the UCI sets, the demo."""
