//go:build tools

// Package main: tools.go names the other command that is built from this module, so that go.mod keeps what it needs.
package main

import _ "helm.sh/helm/v3/cmd/helm"
