"""Mean test NLL that others published on the same splits. They are claims of others, not run here."""

#: On the canonical splits, by a public rerun (ayhamo/Probabilistic_Point_Estimations on GitHub).
RERUN = {
    "TabPFN v2": {"concrete": 2.21, "energy": 0.15, "power": 2.28, "protein": 1.73, "yacht": -0.73},
    "TabResFlow": {"protein": 1.93},
}
#: The best of the nnuncert collection on shifted splits.
SHIFTED = {
    "boston-gap": 2.51,
    "concrete-gap": 3.31,
    "energy-gap": 7.55,
    "kin8nm-gap": -1.24,
    "power-gap": 2.87,
    "wine-gap": 0.96,
    "yacht-gap": 1.58,
    "boston-tail": 3.53,
    "concrete-tail": 3.66,
    "energy-tail": 13.6,
    "kin8nm-tail": -1.08,
    "power-tail": 3.05,
    "wine-tail": 1.21,
    "yacht-tail": 2.59,
}
