"""Measures, kernels, embeddings: P, Q, κ, μ_P."""
