"""A fitted model as a scikit-learn regressor, for pipelines, metrics and cross-validation of that library.

The coefficients are those of the file: `fit` learns nothing, so that a cross-validation scores the file on every fold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import narwhals.stable.v2 as nw
import numpy as np
import polars as pl
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_array, check_consistent_length

from tracefit.coefficients.compiled import CompiledModel
from tracefit.coefficients.predict_frames import OUTPUTS, as_frame, predict_rows
from tracefit.errors import UsageError
from tracefit.fit.fitted import matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sklearn.utils import Tags

    from tracefit.coefficients.model import Model


class LatencyRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Predicts the target of a fitted model, in microseconds, from the rows of X.

    X is an array whose columns are `feature_names_in_`, in this order, or a frame of any library that has
    these columns, or features that are computed from them, among others: `timeline` and the training tables
    do. A missing value in X is an error, as for most regressors of scikit-learn.

    Args:
        model: The model, from a coefficient file; `Models.as_sklearn` gives it.
        features: Columns of X: features of the model, or columns of the tables that they are computed from.
            By default these columns, in alphabetical order.

    Examples:
        Steps of 1 ms and 50 us per decode token, predicted for 4 and for 10 tokens:

        >>> from tracefit.coefficients.model import LinearModel, Number, Term
        >>> per_token = Term(feature="decode_tokens", unit="us/token", value=50)
        >>> model = LinearModel(
        ...     name="beta.cycle_time", scope_id="server", intercept=Number(value=1000), terms=(per_token,)
        ... )
        >>> regressor = LatencyRegressor(model)
        >>> regressor.feature_names_in_.tolist()
        ['decode_tokens']
        >>> regressor.predict([[4], [10]])
        array([1200., 1500.])
    """

    def __init__(self, model: Model, features: Sequence[str] | None = None) -> None:
        self.model = model
        self.features = features

    @property
    def feature_names_in_(self) -> np.ndarray[Any, Any]:
        """Columns of X: an array of text."""
        return np.asarray(self._names, dtype=object)

    @property
    def n_features_in_(self) -> int:
        """Number of columns of X."""
        return len(self._names)

    @property
    def _names(self) -> list[str]:
        if self.features is not None:
            return list(self.features)
        return sorted(CompiledModel(self.model).inputs)

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:  # noqa: ARG002, N803 - scikit-learn calls it so
        """Check that X and y fit together, and change nothing: the coefficients are those of the file.

        Raises:
            UsageError: X lacks a column.
            ValueError: X is not an array of numbers, has other columns, or not as many rows as y.
        """
        rows = self._rows(X)
        if y is not None:
            check_consistent_length(rows, y)
        return self

    def predict(self, X: Any) -> np.ndarray[Any, Any]:  # noqa: N803 - scikit-learn's name
        """Return a prediction per row of X, in microseconds.

        Raises:
            UsageError: X lacks a column that the model needs.
            ValueError: X is not an array of numbers, or has other columns.
        """
        return predict_rows(self.model, self._rows(X))[OUTPUTS[0]].to_numpy()

    def _rows(self, X: Any) -> pl.DataFrame:  # noqa: N803
        names = self._names
        known = nw.from_native(X, pass_through=True)
        # A frame of pandas may number its columns: then they are taken in order, as for an array.
        if isinstance(known, nw.LazyFrame) or (
            isinstance(known, nw.DataFrame) and all(isinstance(c, str) for c in known.columns)
        ):
            frame = as_frame(X)
            if self.features is None:
                compiled = CompiledModel(self.model)
                names = sorted(compiled.formulas.inputs(compiled.features, frame.columns))
            if lacking := [n for n in names if n not in frame.columns]:
                raise UsageError(
                    f"X has no column {', '.join(lacking)}, which {self.model.name} needs",
                    hint=f"there are: {', '.join(frame.columns[:20])}",
                )
            X = matrix(frame, names)  # noqa: N806
        # A model that is a constant has no column.
        checked = check_array(X, dtype="float64", ensure_min_features=min(1, len(names)))
        if checked.shape[1] != len(names):
            raise ValueError(
                f"X has {checked.shape[1]} features, but {type(self).__name__} is expecting {len(names)} features as "
                f"input: {', '.join(names)}"
            )
        # A frame without a column would have no rows.
        return pl.DataFrame({"row": np.arange(len(checked)), **dict(zip(names, checked.T, strict=True))})

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags
