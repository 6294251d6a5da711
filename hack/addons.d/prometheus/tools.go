//go:build tools

// Package main: tools.go names the command that is built from this module, so that go.mod keeps what it needs.
package main

import _ "github.com/prometheus/prometheus/cmd/prometheus"
