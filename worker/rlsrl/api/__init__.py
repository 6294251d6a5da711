"""The experiment's spec and each role's resolved config: the one source of CRD, ConfigMaps and reference."""
