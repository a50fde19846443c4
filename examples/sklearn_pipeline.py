"""A scikit-learn pipeline that notices when its table comes from elsewhere.

Tumours are told apart by 30 measurements of their cell nuclei. Then a second laboratory measures at double
magnification: lengths are doubled, areas quadrupled. A network with a softmax goes on, surer than ever, and wrong;
SNGPClassifier knows that it does not know these rows.
"""

from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from afield import SNGPClassifier

ALPHA = 0.05


def main() -> None:
    table, tumour = load_breast_cancer(return_X_y=True, as_frame=True)
    tumour = tumour.map({0: "malignant", 1: "benign"})
    table["size"] = (table["mean radius"] > 15).map({True: "large", False: "small"})  # a column of text
    x, x_new, y, y_new = train_test_split(table, tumour, test_size=0.3, random_state=0, stratify=tumour)

    encode = ColumnTransformer([("text", OneHotEncoder(), ["size"])], remainder="passthrough")
    ours = make_pipeline(encode, SNGPClassifier(random_state=0)).fit(x, y)
    theirs = make_pipeline(encode, StandardScaler(), MLPClassifier(max_iter=500, random_state=0)).fit(x, y)

    factor = {name: 4 if "area" in name else 2 for name in x if any(w in name for w in ("radius", "perimeter", "area"))}
    elsewhere = x_new.assign(**{name: x_new[name] * times for name, times in factor.items()})

    print(f"{len(x)} tumours to learn from, {len(x_new)} new ones\n")
    print(f"{'':38}{'SNGPClassifier':>16}{'MLPClassifier':>16}")
    for name, rows in (("new tumours", x_new), ("double magnification", elsewhere)):
        for what, metric in (
            ("accuracy", lambda model, rows=rows: model.score(rows, y_new)),
            ("mean confidence", lambda model, rows=rows: model.predict_proba(rows).max(axis=1).mean()),
            ("log loss", lambda model, rows=rows: log_loss(y_new, model.predict_proba(rows))),
        ):
            print(f"{name + ', ' + what:<38}{metric(ours):>16.3f}{metric(theirs):>16.3f}")
        known = ours[-1].accept(ours[:-1].transform(rows), alpha=ALPHA)
        print(f"{name + ', refused':<38}{1 - known.mean():>16.0%}{'never':>16}\n")


if __name__ == "__main__":
    main()
