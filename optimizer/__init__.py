"""How to choose: exhaustive and Optuna search, Pareto fronts."""
