// The weight-stationary array: two sets of N x N weights, and each column's sum over the rows of
// activation * weight, exact (microarchitecture.md, "MAC array"). Diagonal weights: one product a
// column. PE_FORM = 0: rows in loops, fast in simulation; 1: a module for each element.
module tw_mac_array
  import tw_pkg::*;
#(
    parameter int unsigned PE_FORM = 0,
    parameter int unsigned SUM_BITS = 16 + $clog2(N)
) (
    input logic clk,
    input logic row_full,  // a row of weights is complete
    input logic [7:0] row_bytes[N],
    input logic [$clog2(N)-1:0] row,
    input logic row_set,
    input logic row_int4,  // two weights a byte
    input logic vector_full,  // a vector of activations is complete
    input logic [7:0] vector[N],
    input logic set,  // of weights it is multiplied with
    input logic diag,  // of the instruction, for weights and activations
    input logic weight_unsigned,  // planted fault: of the last column
    output logic signed [SUM_BITS-1:0] sum_q[N]  // of the vector of the cycle before
);
  function automatic logic [7:0] nibble(input logic [7:0] packed_pair, input logic high);
    logic [3:0] bits;
    bits = high ? packed_pair[7:4] : packed_pair[3:0];
    nibble = {{4{bits[3]}}, bits};
  endfunction

  if (PE_FORM != 0) begin : g_pe
    logic signed [SUM_BITS-1:0] sum[N];
    for (genvar c = 0; c < N; c++) begin : g_column
      logic [7:0] weight;
      assign weight = row_int4 ? nibble(row_bytes[c/2], c % 2 == 1) : row_bytes[c];
      for (genvar r = 0; r < N; r++) begin : g_row
        logic signed [SUM_BITS-1:0] above, below;  // the column's sum
        if (r == 0) begin : g_top
          assign above = '0;
        end else begin : g_inner
          assign above = g_column[c].g_row[r-1].below;
        end
        // A diagonal row goes to the diagonal, and zeros everywhere else.
        tw_mac_pe pe (
            .clk,
            .load(row_full && (diag || row == $clog2(N)'(r))),
            .load_set(row_set),
            .load_weight(diag && r != c ? 8'd0 : weight),
            .set,
            .weight_unsigned(weight_unsigned && c == N - 1),
            .activation(vector[r]),
            .sum_in(above),
            .sum_out(below)
        );
      end
      assign sum[c] = g_row[N-1].below;
    end
    always_ff @(posedge clk) if (vector_full) sum_q <= sum;
  end else begin : g_loops
    logic signed [7:0] weight_q[2][N][N];  // set, row, column; diagonal weights are in row 0

    always_ff @(posedge clk) begin
      if (row_full) begin
        logic signed [7:0] next[N];
        for (int unsigned c = 0; c < N; c++) begin
          next[c] = row_int4 ? nibble(row_bytes[c/2], c[0]) : row_bytes[c];
        end
        weight_q[row_set][row] <= next;
      end
    end

    always_ff @(posedge clk) begin
      if (vector_full) begin
        logic signed [SUM_BITS-1:0] sum[N];
        if (diag) begin
          for (int unsigned c = 0; c < N; c++) begin
            sum[c] = SUM_BITS'($signed(vector[c])) * SUM_BITS'(weight_q[set][0][c]);
          end
          if (weight_unsigned && weight_q[set][0][N-1][7]) begin
            sum[N-1] = sum[N-1] + (SUM_BITS'($signed(vector[N-1])) <<< 8);
          end
        end else begin
          for (int unsigned c = 0; c < N; c++) sum[c] = '0;
          for (int unsigned r = 0; r < N; r++) begin
            for (int unsigned c = 0; c < N; c++) begin
              sum[c] = sum[c] + SUM_BITS'($signed(vector[r])) * SUM_BITS'(weight_q[set][r][c]);
            end
            if (weight_unsigned && weight_q[set][r][N-1][7]) begin
              sum[N-1] = sum[N-1] + (SUM_BITS'($signed(vector[r])) <<< 8);
            end
          end
        end
        sum_q <= sum;
      end
    end
  end
endmodule
