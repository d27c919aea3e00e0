"""Set-up, demo model and serving configurations; runs from the checkout, is not part of the wheel."""
