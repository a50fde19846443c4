# %% [markdown]
# # A table with pandas
#
# A classifier for rows of a data frame, in scikit-learn's manner. It notices when a table comes from elsewhere: a sensor
# in other units, a column that was mixed up, customers of another kind.
#
# The data are scikit-learn's breast tumours: 30 measurements of cell nuclei.

# %%
import matplotlib.pyplot as plt
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from afield import SNGPClassifier

table, tumour = load_breast_cancer(return_X_y=True, as_frame=True)
tumour = tumour.map({0: "malignant", 1: "benign"})
table["size"] = (table["mean radius"] > 15).map({True: "large", False: "small"})  # a column of text
x, x_new, y, y_new = train_test_split(table, tumour, test_size=0.3, random_state=0, stratify=tumour)
x.iloc[:3, [0, 1, 2, 3, -1]]

# %% [markdown]
# ## Fit
#
# Columns are standardised inside. Text goes through your own transformer, as anywhere in scikit-learn. `fit` trains the
# network, fits the Gaussian process and calibrates it on rows that it has held out: at least 99 of them, for p-values
# down to 1%.

# %%
encode = ColumnTransformer([("text", OneHotEncoder(), ["size"])], remainder="passthrough")
ours = make_pipeline(encode, SNGPClassifier(validation_fraction=0.25, random_state=0)).fit(x, y)
trees = make_pipeline(encode, HistGradientBoostingClassifier(random_state=0)).fit(x, y)
print(f"right on new rows: {ours.score(x_new, y_new):.1%}; gradient-boosted trees: {trees.score(x_new, y_new):.1%}")

# %% [markdown]
# ## What it says of a row
#
# Beside class and probability there is a p-value: small where a row lies further out than the rows that it was
# calibrated with.


# %%
def describe(rows: pd.DataFrame) -> pd.DataFrame:
    classifier, matrix = ours[-1], ours[:-1].transform(rows)
    sure = classifier.predict_proba(matrix).max(axis=1)
    return pd.DataFrame(
        {"answer": classifier.predict(matrix), "probability": sure, "p_value": classifier.p_value(matrix)},
        index=rows.index,
    ).round(3)


describe(x_new.head(5))

# %% [markdown]
# ## A table from elsewhere
#
# A second laboratory measures at double magnification: lengths are doubled, areas quadrupled. Nothing in the file says
# so.

# %%
sizes = {name: 4 if "area" in name else 2 for name in x if any(w in name for w in ("radius", "perimeter", "area"))}
elsewhere = x_new.assign(**{name: x_new[name] * factor for name, factor in sizes.items()})
rows = []
for name, part in (("new tumours", x_new), ("double magnification", elsewhere)):
    refused = (describe(part)["p_value"] <= 0.05).mean()
    rows.append((name, trees.score(part, y_new), trees.predict_proba(part).max(axis=1).mean(), refused))
pd.DataFrame(rows, columns=["table", "trees right", "trees' confidence", "refused by afield"]).round(3)

# %% [markdown]
# The trees go on, wrong and about as sure as before. The p-values refuse many times the promised twentieth: a table of
# which that is true is not like the one before.

# %%
figure, axes = plt.subplots(figsize=(7, 3))
bins = [k / 20 for k in range(21)]
axes.hist(describe(x_new)["p_value"], bins, alpha=0.7, label="new tumours")
axes.hist(describe(elsewhere)["p_value"], bins, alpha=0.7, label="double magnification")
axes.axvline(0.05, color="black", linewidth=1, linestyle=":")
axes.set(xlabel="p-value", ylabel="rows", title="p-values of two tables; left of the line is refused at alpha = 0.05")
axes.legend()

# %% [markdown]
# **Next.** Parameters, streams and weights: [scikit-learn](../scikit-learn.md). Files too large for memory:
# [batch scoring](../scoring.md). A table that changes slowly: [drift in production](drift.md).

# %% tags=["remove-cell"]
assert ours.score(x_new, y_new) > 0.93
assert (describe(x_new)["p_value"] <= 0.05).mean() < 0.15
assert (describe(elsewhere)["p_value"] <= 0.05).mean() > 0.2
