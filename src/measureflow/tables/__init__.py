"""From tables to ensembles: the recipe, and scikit-learn's estimators."""
